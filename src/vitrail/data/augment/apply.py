"""Apply RandAugment to a batch: images with the same kind of operation are processed together.

The operations are drawn on the host, so grouping the images needs no device synchronisation. All parameters are copied to
the device at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment import batch_ops
from vitrail.data.augment.randaugment import (
    FILL,
    GEOMETRIC,
    LOOKUP,
    OPERATIONS,
    Operations,
    factor,
    lookup_table,
    matrices,
    strength,
)
from vitrail.data.augment.spec import RandAugmentVariant
from vitrail.data.types import Array

_Transform = Callable[[Tensor, Tensor], Tensor]


class HostToDeviceCopy:
    """Copy many small arrays to a device in one transfer from pinned memory, asynchronously."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []

    def add(self, array: Array) -> int:
        """Add an array and return its index in the result of `to`. Values become float32 (integers must be below 2²⁴)."""
        self._arrays.append(np.asarray(array, dtype=np.float32))
        return len(self._arrays) - 1

    def to(self, device: torch.device) -> list[Tensor]:
        """Copy all arrays, and return them as tensors on the device."""
        sizes = [array.size for array in self._arrays]
        if not sizes:
            return []
        packed = torch.from_numpy(np.concatenate([array.ravel() for array in self._arrays]))
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        return [part.view(array.shape) for part, array in zip(torch.split(packed.to(device), sizes), self._arrays, strict=True)]


def plan_randaugment(
    copy: HostToDeviceCopy, operations: Operations, size: tuple[int, int], device: torch.device
) -> list[tuple[int, int, _Transform]]:
    """Group the images by operation. Each entry is (index of the rows, index of the parameters, transform)."""
    plan: list[tuple[int, int, _Transform]] = []
    for k in range(operations.codes.shape[1]):
        codes, signs, centres = operations.codes[:, k], operations.signs[:, k], operations.centres[:, k]
        names = np.array(OPERATIONS[operations.variant])[codes]
        for group in _GROUPS:
            rows = np.flatnonzero(np.isin(names, group))
            if len(rows):
                parameters, transform = _group(operations, names[rows], signs[rows], centres[rows], size, device)
                plan.append((copy.add(rows), copy.add(parameters), transform))
    return plan


def run_randaugment(images: Tensor, plan: list[tuple[int, int, _Transform]], params: list[Tensor]) -> Tensor:
    """Apply a plan to uint8 images [n, C, H, W], in place."""
    for rows, parameters, transform in plan:
        index = params[rows].long()
        images.index_copy_(0, index, transform(images.index_select(0, index), params[parameters]))
    return images


def randaugment(images: Tensor, operations: Operations) -> Tensor:
    """Apply the drawn operations to uint8 images [n, C, H, W], in place, on their device."""
    copy = HostToDeviceCopy()
    plan = plan_randaugment(copy, operations, (images.shape[2], images.shape[3]), images.device)
    return run_randaugment(images, plan, copy.to(images.device))


_GROUPS = (GEOMETRIC, LOOKUP, ("Color",), ("Contrast",), ("Sharpness",), ("AutoContrast",), ("Equalize",), ("Cutout",))


def _group(
    operations: Operations, names: Array, signs: Array, centres: Array, size: tuple[int, int], device: torch.device
) -> tuple[Array, _Transform]:
    variant, magnitude = operations.variant, operations.magnitude
    kind = str(names[0])
    fill, tensorflow = FILL[variant], variant == "big-vision"
    amount = strength(variant, kind, magnitude, size)
    if kind in GEOMETRIC:
        affine = np.zeros((len(names), 2, 3))
        for name in set(names.tolist()):
            rows = names == name
            affine[rows] = matrices(variant, name, strength(variant, name, magnitude, size), signs[rows], size)
        return affine, lambda images, m: batch_ops.affine(images, m, fill)
    if kind in LOOKUP:
        numbers = np.array([LOOKUP.index(name) * 2 for name in names]) + (signs > 0)
        tables = _lookup_tables(variant, magnitude, device)
        return numbers, lambda images, n: batch_ops.apply_lookup(images, tables[n.long()])
    if kind == "Color":
        return factor(variant, amount, signs), lambda images, f: batch_ops.adjust_saturation(images, f, tensorflow=tensorflow)
    if kind == "Contrast":
        return factor(variant, amount, signs), lambda images, f: batch_ops.adjust_contrast(images, f, tensorflow=tensorflow)
    if kind == "Sharpness":
        return factor(variant, amount, signs), lambda images, f: batch_ops.adjust_sharpness(images, f, tensorflow=tensorflow)
    if kind == "Cutout":
        return np.floor(centres * np.array(size)), lambda images, c: batch_ops.cutout(images, c, int(amount), fill)
    transform = batch_ops.autocontrast if kind == "AutoContrast" else batch_ops.equalize
    return np.zeros(0), lambda images, _: transform(images)


@lru_cache(maxsize=32)
def _lookup_tables(variant: RandAugmentVariant, magnitude: float, device: torch.device) -> Tensor:
    """Return two tables per operation, for signs −1 and +1. The magnitude is fixed during a run, so they are cached."""
    rows = []
    for name in LOOKUP:
        amount = strength(variant, name, magnitude, (1, 1))
        signs = np.array([-1.0, 1.0])
        arguments = factor(variant, amount, signs) if name == "Brightness" else np.full(2, amount)
        rows += [lookup_table(name, float(argument)) for argument in arguments]
    return torch.from_numpy(np.stack(rows)).to(device)
