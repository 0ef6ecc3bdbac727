"""Transforms on the device: from integer pixel values to the model's input.

With `Augment(device="gpu")` images are cropped, and changed by RandAugment and the like, here, as a batch. Normalisation,
erasing, label smoothing and mixing always happen here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.apply import HostToDeviceCopy, Plan, plan_operations, run_operations
from vitrail.data.augment.erase import draw_erasures, erase
from vitrail.data.augment.mix import Mixing, check_targets, draw_mixing, mix_images, soft_targets
from vitrail.data.augment.resample import crop_resize
from vitrail.data.augment.spec import Augment
from vitrail.data.batch import Batch, HostBatch
from vitrail.data.preprocess import Preprocess
from vitrail.data.train_reader import slice_boxes, slice_flips, slice_operations
from vitrail.data.types import Task
from vitrail.errors import VitrailError


class DeviceTransforms:
    """Turn a host batch into a batch on the device. Parameters are drawn per image; there is no device synchronisation."""

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
        if augment.changes_pixels and preprocess.bits != 8:
            raise VitrailError(
                f"RandAugment, TrivialAugment, 3-Augment and colour jitter need 8-bit images, but this preprocessing has "
                f"{preprocess.bits} bits. Switch them off, or set bits to 8."
            )
        self.preprocess, self.augment, self.seed = preprocess, augment, seed
        self.task: Task = task
        self.classes, self.device = classes, torch.device(device)
        self.stop_mixing_at: tuple[int, int] | None = None
        """(Epoch, step) from which on images are not mixed. Targets stay class probabilities, as a captured graph expects."""
        mean, std = (np.array(values, dtype=np.float64) for values in (preprocess.mean, preprocess.std))
        # (x / max_value − mean) / std as one multiplication and one addition. Repeated along a row of pixels, because
        # images are channels_last in memory, and three channels are too few to vectorise over.
        self._scale, self._shift = (
            torch.tensor(values, dtype=torch.float32, device=self.device).repeat(preprocess.size[1], 1).T[:, None]
            for values in (1 / (preprocess.max_value * std), -mean / std)
        )

    def __call__(self, host: HostBatch) -> Batch:
        augment, batch_slice, size = self.augment, host.slice, self.preprocess.size
        images = host.images.to(self.device, non_blocking=True)
        targets = host.targets.to(self.device, non_blocking=True)
        copy = HostToDeviceCopy()
        boxes = flips = rectangles = weights = pasted = 0
        if host.uncropped:
            heights, widths = (np.full(len(batch_slice.indices), side) for side in images.shape[1:3])
            boxes = copy.add(slice_boxes(augment, self.seed, batch_slice, heights, widths))
            flips = copy.add(slice_flips(augment, self.seed, batch_slice))
        plan: Plan = []
        if augment.changes_pixels and augment.device == "gpu":
            plan = plan_operations(copy, slice_operations(augment, self.preprocess, self.seed, batch_slice), size)
        if augment.erase > 0:
            drawn = [draw_erasures(augment, self.seed, batch_slice.epoch, *positions, size) for positions in batch_slice.ranges]
            rectangles = copy.add(np.concatenate(drawn))
        mixing = draw_mixing(augment, self.seed, batch_slice.epoch, batch_slice.step, batch_slice.total, size)
        if mixing is not None:
            if self.stop_mixing_at is not None and (batch_slice.epoch, batch_slice.step) >= self.stop_mixing_at:
                mixing = Mixing.none(batch_slice.total)
            mixing = mixing.part(batch_slice.offset, batch_slice.count)
            weights, pasted = copy.add(mixing.weights), copy.add(mixing.boxes)
        params = copy.to(self.device)

        if host.uncropped:
            images = crop_resize(
                images,
                params[boxes],
                params[flips] > 0,
                size,
                interpolation=augment.interpolation,
                antialias=augment.antialias,
            )
        images = run_operations(images, plan, params)
        images = self._normalise(images)
        if augment.erase > 0:
            images = erase(images, params[rectangles], noise=augment.erase_fill == "noise")
        if mixing is not None or augment.smoothing > 0:
            targets = soft_targets(targets, self.task, self.classes, augment.smoothing)
        if mixing is not None:
            images, targets = _mix(images, targets, params[weights], params[pasted], batch_slice.has_partner)
        return Batch(
            images,
            targets,
            host.indices,
            batch_slice.epoch,
            batch_slice.step,
            batch_slice.micro_step,
            batch_slice.micro_steps,
            batch_slice.total,
            host.bad,
        )

    def _normalise(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu":
            return torch.mul(images, self._scale).add_(self._shift)
        # On a CPU this is bound by memory bandwidth, so normalise one image at a time, which stays in cache. numpy, because
        # its single thread does not compete with the loader's workers.
        result = torch.empty_like(images, dtype=torch.float32)
        scale, shift = self._scale.numpy(), self._shift.numpy()
        for floats, pixels in zip(result.numpy(), images.numpy(), strict=True):
            floats[...] = pixels
            floats *= scale
            floats += shift
        return result


def _mix(images: Tensor, targets: Tensor, weights: Tensor, boxes: Tensor, has_partner: bool) -> tuple[Tensor, Tensor]:
    """Mix each image with the one before it. The partner of the first is in the slice, or is the last of the batch."""
    if has_partner:
        own, partners, own_targets, partner_targets = images[1:], images[:-1], targets[1:], targets[:-1]
    else:
        own, partners, own_targets, partner_targets = images, images.roll(1, 0), targets, targets.roll(1, 0)
    return mix_images(own, partners, weights, boxes), partner_targets.lerp(own_targets, weights[:, None])
