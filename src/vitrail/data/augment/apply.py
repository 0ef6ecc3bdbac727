"""Apply RandAugment to a batch: images with the same kind of operation are processed together.

The operations are drawn on the host, so grouping the images needs no device synchronisation. All parameters are copied to
the device at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment import batch_ops
from vitrail.data.augment.randaugment import (
    ENHANCE,
    GEOMETRIC,
    LOOKUP,
    OPERATIONS,
    Operations,
    Rules,
    factor,
    matrices,
    point_parameters,
    strength,
)
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


def plan_randaugment(copy: HostToDeviceCopy, operations: Operations, size: tuple[int, int]) -> list[tuple[int, int, _Transform]]:
    """Group the images by operation. Each entry is (index of the rows, index of the parameters, transform)."""
    plan: list[tuple[int, int, _Transform]] = []
    names = OPERATIONS[operations.rules.variant]
    # A skipped operation has the code −1, which is the last entry: no group.
    group_of = np.array([next((k for k, group in enumerate(_GROUPS) if name in group), -1) for name in names] + [-1])
    for k in range(operations.codes.shape[1]):
        groups = group_of[operations.codes[:, k]]
        for number, group in enumerate(_GROUPS):
            rows = np.flatnonzero(groups == number)
            if len(rows):
                parameters, transform = _group(group, _Drawn.of(operations, rows, k), operations.rules, size)
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
    plan = plan_randaugment(copy, operations, (images.shape[2], images.shape[3]))
    return run_randaugment(images, plan, copy.to(images.device))


_GROUPS = (GEOMETRIC, LOOKUP, ("Color",), ("Contrast",), ("Sharpness",), ("AutoContrast",), ("Equalize",), ("Cutout",))
_ARITHMETIC: dict[str, batch_ops.Arithmetic] = {"torchvision": "torchvision", "big-vision": "tensorflow", "timm": "pillow"}


@dataclass(frozen=True)
class _Drawn:
    """The k-th operations of some images. Arrays are [n]."""

    names: Array
    magnitudes: Array
    signs: Array
    centres: Array

    @classmethod
    def of(cls, operations: Operations, rows: Array, k: int) -> _Drawn:
        names = np.array(OPERATIONS[operations.rules.variant])[operations.codes[rows, k]]
        return cls(names, operations.magnitudes[rows, k], operations.signs[rows, k], operations.centres[rows, k])


def _group(group: tuple[str, ...], drawn: _Drawn, rules: Rules, size: tuple[int, int]) -> tuple[Array, _Transform]:
    arithmetic = _ARITHMETIC[rules.variant]
    if group == GEOMETRIC:
        affine = _by_name(drawn, (2, 3), lambda name, m, s: matrices(rules, name, strength(rules, name, m, size), s, size))
        return affine, lambda images, m: batch_ops.affine(images, m, rules.fill, rules.interpolation)
    if group == LOOKUP:
        points = _by_name(drawn, (6,), lambda name, m, s: point_parameters(name, _argument(rules, name, m, s, size)))
        return points, lambda images, p: batch_ops.apply_lookup(images, batch_ops.point_tables(p))
    kind = group[0]
    arguments = _argument(rules, kind, drawn.magnitudes, drawn.signs, size)
    if kind == "Color":
        return arguments, lambda images, f: batch_ops.adjust_saturation(images, f, arithmetic)
    if kind == "Contrast":
        return arguments, lambda images, f: batch_ops.adjust_contrast(images, f, arithmetic)
    if kind == "Sharpness":
        return arguments, lambda images, f: batch_ops.adjust_sharpness(images, f, arithmetic)
    if kind == "Cutout":
        boxes = np.concatenate([np.floor(drawn.centres * np.array(size)), arguments[:, None]], axis=1)
        return boxes, lambda images, b: batch_ops.cutout(images, b[:, :2], b[:, 2], rules.fill)
    transform = batch_ops.autocontrast if kind == "AutoContrast" else batch_ops.equalize
    return np.zeros(0), lambda images, _: transform(images)


def _argument(rules: Rules, name: str, magnitudes: Array, signs: Array, size: tuple[int, int]) -> Array:
    amounts = strength(rules, name, magnitudes, size)
    return factor(rules, amounts, signs) if name in ENHANCE else amounts


def _by_name(drawn: _Drawn, shape: tuple[int, ...], parameters: Callable[[str, Array, Array], Array]) -> Array:
    """Compute parameters for the images of each operation, [n, *shape]."""
    result = np.zeros((len(drawn.names), *shape))
    for name in set(drawn.names.tolist()):
        rows = drawn.names == name
        result[rows] = parameters(name, drawn.magnitudes[rows], drawn.signs[rows])
    return result
