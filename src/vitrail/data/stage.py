"""The last leg, on the device: from whole pixel values to what the model takes.

Batched RandAugment and cropping where the GPU does them, then for every run alike: normalise, erase, smooth, mix.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.apply import Courier, plan_randaugment, run_randaugment
from vitrail.data.augment.erase import draw_erasures, erase
from vitrail.data.augment.mix import check_targets, draw_mixing, mix_images, soft_targets
from vitrail.data.augment.resample import crop_resize
from vitrail.data.augment.spec import Augment
from vitrail.data.batch import Batch, HostBatch
from vitrail.data.preprocess import Preprocess
from vitrail.data.read import boxes_of, flips_of, operations_of
from vitrail.data.types import Task
from vitrail.errors import VitrailError


class Stage:
    """Finishes a host batch on a device. All parameters differ from image to image; the device is never waited for."""

    def __init__(
        self,
        preprocess: Preprocess,
        augment: Augment,
        *,
        task: Task,
        classes: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        check_targets(augment, task, classes)
        if augment.randaugment != "none" and preprocess.bits != 8:
            raise VitrailError(
                f"RandAugment works on images of 8 bits, and this preprocessing keeps {preprocess.bits}. "
                "Set randaugment to 'none', or bits to 8."
            )
        self.preprocess, self.augment, self.seed = preprocess, augment, seed
        self.task: Task = task
        self.classes, self.device = classes, torch.device(device)
        mean, std = (np.array(values, dtype=np.float64) for values in (preprocess.mean, preprocess.std))
        # (x / brightest − mean) / std as one multiplication and one addition. Repeated along a row of pixels, because
        # images lie in memory channel by channel within a pixel and three numbers are too few to vectorise over.
        self._scale, self._shift = (
            torch.tensor(values, dtype=torch.float32, device=self.device).repeat(preprocess.size[1], 1).T[:, None]
            for values in (1 / (preprocess.brightest * std), -mean / std)
        )

    def __call__(self, host: HostBatch) -> Batch:
        augment, where, size = self.augment, host.where, self.preprocess.size
        images = host.images.to(self.device, non_blocking=True)
        targets = host.targets.to(self.device, non_blocking=True)
        courier = Courier()
        boxes = flips = rectangles = shares = pasted = 0
        if host.whole:
            rows, columns = (np.full(len(where.indices), side) for side in images.shape[1:3])
            boxes = courier.add(boxes_of(augment, self.seed, where, rows, columns))
            flips = courier.add(flips_of(augment, self.seed, where))
        plan = []
        if augment.randaugment != "none" and augment.device == "gpu":
            plan = plan_randaugment(courier, operations_of(augment, self.seed, where), size, self.device)
        if augment.erase > 0:
            drawn = [draw_erasures(augment, self.seed, where.epoch, *run, size) for run in where.runs]
            rectangles = courier.add(np.concatenate(drawn))
        mixing = draw_mixing(augment, self.seed, where.epoch, where.step, where.total, size)
        if mixing is not None:
            mixing = mixing.part(where.offset, where.count)
            shares, pasted = courier.add(mixing.shares), courier.add(mixing.boxes)
        parcels = courier.deliver(self.device)

        if host.whole:
            images = crop_resize(
                images,
                parcels[boxes],
                parcels[flips] > 0,
                size,
                interpolation=augment.interpolation,
                antialias=augment.antialias,
            )
        images = run_randaugment(images, plan, parcels)
        images = self._normalise(images)
        if augment.erase > 0:
            images = erase(images, parcels[rectangles], noise=augment.erase_fill == "noise")
        if mixing is not None or augment.smoothing > 0:
            targets = soft_targets(targets, self.task, self.classes, augment.smoothing)
        if mixing is not None:
            images, targets = _mix(images, targets, parcels[shares], parcels[pasted], where.has_neighbour)
        return Batch(images, targets, host.indices, where.epoch, where.step, where.part, where.parts, where.total)

    def _normalise(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu":
            return torch.mul(images, self._scale).add_(self._shift)
        # A processor is held up by its memory, so image by image: what one operation leaves in the cache the next one
        # finds there. And by numpy, whose single thread does not wait for another that the workers keep from running.
        result = torch.empty_like(images, dtype=torch.float32)
        scale, shift = self._scale.numpy(), self._shift.numpy()
        for floats, pixels in zip(result.numpy(), images.numpy(), strict=True):
            floats[...] = pixels
            floats *= scale
            floats += shift
        return result


def _mix(images: Tensor, targets: Tensor, shares: Tensor, boxes: Tensor, neighbour: bool) -> tuple[Tensor, Tensor]:
    """Mix each image with the one before it; a slice brings its first partner along, a whole batch goes round."""
    if neighbour:
        own, partners, own_targets, partner_targets = images[1:], images[:-1], targets[1:], targets[:-1]
    else:
        own, partners, own_targets, partner_targets = images, images.roll(1, 0), targets, targets.roll(1, 0)
    return mix_images(own, partners, shares, boxes), partner_targets.lerp(own_targets, shares[:, None])
