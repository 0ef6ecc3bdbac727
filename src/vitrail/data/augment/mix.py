"""Mix images and labels: mixup, cutmix, label smoothing.

An image is always mixed with the one before it in the *global* batch, the first with the last. The order of an epoch is
random, so this is a random partner, and a rank needs only one extra image, for any number of ranks. Batches of any size
work, odd ones too; a single image is mixed with itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment.rng import Purpose, generator
from vitrail.data.augment.spec import Augment
from vitrail.data.types import Array, Task
from vitrail.errors import VitrailError


@dataclass(frozen=True)
class Mixing:
    """The mixing of one step, per image: the weight of the image itself, and the box to paste from its partner.

    With an empty box the images are blended (mixup), otherwise the partner's pixels are pasted (cutmix).
    """

    weights: Array
    boxes: Array
    """[n, 4]: top, left, bottom, right."""

    @classmethod
    def none(cls, count: int) -> Mixing:
        """Return the mixing that leaves images and targets as they are."""
        return cls(np.ones(count), np.zeros((count, 4)))

    def part(self, first: int, count: int) -> Mixing:
        return Mixing(self.weights[first : first + count], self.boxes[first : first + count])


def draw_mixing(augment: Augment, seed: int, epoch: int, step: int, count: int, size: tuple[int, int]) -> Mixing | None:
    """Draw the mixing of a global batch of `count` images; None if images are not mixed."""
    if not augment.mixes:
        return None
    rng = generator(seed, epoch, Purpose.MIX, step)
    per_batch = augment.mix == "batch"
    draws = 1 if per_batch else count
    mixed = rng.random(draws) < augment.mix_probability
    use_cutmix = rng.random(draws) < (augment.cutmix_probability if augment.mixup > 0 else 1.0)
    use_cutmix &= augment.cutmix > 0
    mixup_lam = rng.beta(augment.mixup, augment.mixup, draws) if augment.mixup > 0 else np.ones(draws)
    cutmix_lam = rng.beta(augment.cutmix, augment.cutmix, draws) if augment.cutmix > 0 else np.ones(draws)
    if per_batch:
        mixup_lam = np.maximum(mixup_lam, 1 - mixup_lam)  # big_vision's rule: the image itself has at least half the weight
    boxes = _cutmix_boxes(cutmix_lam, rng.random((draws, 2)), size)
    boxes[~(mixed & use_cutmix)] = 0
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (size[0] * size[1])
    weights = np.where(mixed, np.where(use_cutmix, 1 - area, mixup_lam), 1.0)
    if per_batch:
        weights, boxes = weights.repeat(count), boxes.repeat(count, axis=0)
    return Mixing(weights, boxes)


def _cutmix_boxes(lam: Array, centres: Array, size: tuple[int, int]) -> Array:
    """Return boxes with the image's aspect ratio and 1 − lam of its area, clipped at the border."""
    sides = np.array(size)
    lengths = np.floor(sides * np.sqrt(1 - lam)[:, None]).astype(np.int64)
    low = np.floor(centres * sides).astype(np.int64) - lengths // 2
    return np.concatenate([np.clip(low, 0, sides), np.clip(low + lengths, 0, sides)], axis=1)


def mix_images(images: Tensor, partners: Tensor, weights: Tensor, boxes: Tensor) -> Tensor:
    """Blend float images [n, C, H, W] with their partners, or paste a box of the partner."""
    y = torch.arange(images.shape[2], device=images.device)[None, :, None]
    x = torch.arange(images.shape[3], device=images.device)[None, None, :]
    top, left, bottom, right = (side[:, None, None] for side in boxes.unbind(1))
    pasted = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    blended = (boxes[:, 2] <= boxes[:, 0]) | (boxes[:, 3] <= boxes[:, 1])
    pixel_weights = torch.where(blended[:, None, None], weights[:, None, None], (~pasted).to(weights.dtype))[:, None]
    return partners.lerp(images, pixel_weights)


def soft_targets(targets: Tensor, task: Task, classes: int, smoothing: float) -> Tensor:
    """Convert targets so that they can be mixed: class indices become smoothed one-hot rows, others are unchanged."""
    if task == "classify":
        return F.one_hot(targets, classes).float().mul_(1 - smoothing).add_(smoothing / classes)
    return targets.float()


def check_targets(augment: Augment, task: Task, classes: int) -> None:
    """Refuse settings that the task does not support, before any image is read."""
    if augment.smoothing > 0 and task != "classify":
        raise VitrailError(
            f"Label smoothing needs one class per image, but this dataset has the task {task!r}. Set smoothing to 0."
        )
    if task == "classify" and classes < 1:
        raise VitrailError("The training split has no classes. Check the data with `vitrail data check`.")
