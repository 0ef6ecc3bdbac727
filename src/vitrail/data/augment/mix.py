"""Mixing images and labels: mixup, cutmix, label smoothing.

An image is always mixed with the one before it in the *global* batch, the first with the last. The order of an epoch is
random, so a neighbour is a random partner; and a rank that holds a part of the batch needs only one image more, whatever
the number of ranks. Batches of any size work, odd ones too; an image alone in its batch meets itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment.spec import Augment
from vitrail.data.augment.streams import Stream, generator
from vitrail.data.types import Array, Task
from vitrail.errors import VitrailError


@dataclass(frozen=True)
class Mixing:
    """One step's decisions, for each of n images: the share that stays its own, and the rectangle that is replaced.

    With an empty rectangle the images are blended, with another the partner's pixels are pasted in.
    """

    shares: Array
    boxes: Array
    """[n, 4]: top, left, bottom, right."""

    def part(self, first: int, count: int) -> Mixing:
        return Mixing(self.shares[first : first + count], self.boxes[first : first + count])


def draw_mixing(augment: Augment, seed: int, epoch: int, step: int, count: int, size: tuple[int, int]) -> Mixing | None:
    """The mixing of a step's global batch of `count` images; None where augmentation does not mix."""
    if not augment.mixes:
        return None
    chance = generator(seed, epoch, Stream.MIX, step)
    together = augment.mix == "reference"
    draws = 1 if together else count
    mixed = chance.random(draws) < augment.mix_probability
    pasted = chance.random(draws) < (augment.cutmix_share if augment.mixup > 0 else 1.0)
    pasted &= augment.cutmix > 0
    blended = chance.beta(augment.mixup, augment.mixup, draws) if augment.mixup > 0 else np.ones(draws)
    kept = chance.beta(augment.cutmix, augment.cutmix, draws) if augment.cutmix > 0 else np.ones(draws)
    if together:
        blended = np.maximum(blended, 1 - blended)  # the reference's: an image stays at least half itself
    boxes = _boxes(kept, chance.random((draws, 2)), size)
    boxes[~(mixed & pasted)] = 0
    covered = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (size[0] * size[1])
    shares = np.where(mixed, np.where(pasted, 1 - covered, blended), 1.0)
    if together:
        shares, boxes = shares.repeat(count), boxes.repeat(count, axis=0)
    return Mixing(shares, boxes)


def _boxes(kept: Array, centres: Array, size: tuple[int, int]) -> Array:
    """Rectangles of the image's own shape covering 1 − kept of it, cut off where they stick out."""
    sides = np.array(size)
    half = np.floor(sides * np.sqrt(1 - kept)[:, None]).astype(np.int64)
    low = np.floor(centres * sides).astype(np.int64) - half // 2
    return np.concatenate([np.clip(low, 0, sides), np.clip(low + half, 0, sides)], axis=1)


def mix_images(images: Tensor, partners: Tensor, shares: Tensor, boxes: Tensor) -> Tensor:
    """Float images [n, C, H, W] blended with their partners, or with a rectangle of them pasted in."""
    y = torch.arange(images.shape[2], device=images.device)[None, :, None]
    x = torch.arange(images.shape[3], device=images.device)[None, None, :]
    top, left, bottom, right = (side[:, None, None] for side in boxes.unbind(1))
    pasted = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    blends = (boxes[:, 2] <= boxes[:, 0]) | (boxes[:, 3] <= boxes[:, 1])
    own = torch.where(blends[:, None, None], shares[:, None, None], (~pasted).to(shares.dtype))[:, None]
    return partners.lerp(images, own)


def soft_targets(targets: Tensor, task: Task, classes: int, smoothing: float) -> Tensor:
    """Targets as they can be mixed: class numbers become shares of classes, smoothed; numbers stay numbers."""
    if task == "classify":
        return F.one_hot(targets, classes).float().mul_(1 - smoothing).add_(smoothing / classes)
    return targets.float()


def check_targets(augment: Augment, task: Task, classes: int) -> None:
    """Refuse what has no meaning for a task before any image is read."""
    if augment.smoothing > 0 and task != "classify":
        raise VitrailError(
            f"Label smoothing is for one class an image, and this data is for the task {task!r}. Set smoothing to 0."
        )
    if task == "classify" and classes < 1:
        raise VitrailError("The training split has no classes. Check the data with `vitrail data check`.")
