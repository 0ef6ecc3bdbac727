"""Apply drawn operations to a batch: images with the same kind of operation are processed together.

The operations are drawn on the host, so grouping the images needs no device synchronisation. All parameters are copied to
the device at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment import batch_ops, colour_ops
from vitrail.data.augment.colour import draw_jitter, draw_three_augment
from vitrail.data.augment.operations import GEOMETRIC, LOOKUP, Arithmetic, Operations, Style, matrices, point_parameters
from vitrail.data.augment.randaugment import draw_randaugment, draw_trivialaugment
from vitrail.data.augment.spec import Augment
from vitrail.data.types import Array

_Transform = Callable[[Tensor, Tensor], Tensor]
Plan = list[tuple[int, int, _Transform]]


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


def draw_operations(
    augment: Augment, mean: tuple[float, ...], size: tuple[int, int], seed: int, epoch: int, first: int, count: int
) -> list[Operations]:
    """Draw all operations of the images at positions first, first + 1, … of an epoch, in the order in which they are applied."""
    where = (seed, epoch, first, count)
    drawn = []
    if augment.randaugment != "none":
        drawn.append(draw_randaugment(augment, mean, size, *where))
    if augment.trivialaugment:
        drawn.append(draw_trivialaugment(mean, *where))
    if augment.three_augment:
        drawn.append(draw_three_augment(mean, *where))
    if augment.jitters:
        drawn.append(draw_jitter(augment, mean, *where))
    return drawn


def plan_operations(copy: HostToDeviceCopy, drawn: list[Operations], size: tuple[int, int]) -> Plan:
    """Group the images by operation. Each entry is (index of the rows, index of the parameters, transform)."""
    plan: Plan = []
    for operations in drawn:
        # A skipped operation has the code −1, which is the last entry: no group.
        group_of = np.array([_group_number(name) for name in operations.names] + [-1])
        for k in range(operations.codes.shape[1]):
            groups = group_of[operations.codes[:, k]]
            for number in np.unique(groups[groups >= 0]):
                rows = np.flatnonzero(groups == number)
                parameters, transform = _transform(_GROUPS[number], operations, rows, k, size)
                plan.append((copy.add(rows), copy.add(parameters), transform))
    return plan


def run_operations(images: Tensor, plan: Plan, params: list[Tensor]) -> Tensor:
    """Apply a plan to uint8 images [n, C, H, W], in place."""
    for rows, parameters, transform in plan:
        index = params[rows].long()
        images.index_copy_(0, index, transform(images.index_select(0, index), params[parameters]))
    return images


def apply_operations(images: Tensor, drawn: list[Operations]) -> Tensor:
    """Apply the drawn operations to uint8 images [n, C, H, W], in place, on their device."""
    copy = HostToDeviceCopy()
    plan = plan_operations(copy, drawn, (images.shape[2], images.shape[3]))
    return run_operations(images, plan, copy.to(images.device))


_GROUPS = (
    *(GEOMETRIC, LOOKUP, ("Color",), ("Contrast",), ("Sharpness",), ("AutoContrast",), ("Equalize",), ("Cutout",)),
    *(("Grayscale",), ("GaussianBlur",), ("Hue",)),
)


def _group_number(name: str) -> int:
    return next((number for number, group in enumerate(_GROUPS) if name in group), -1)


def _transform(
    group: tuple[str, ...], operations: Operations, rows: Array, k: int, size: tuple[int, int]
) -> tuple[Array, _Transform]:
    """Return the parameters of the k-th operations of some images, which are all of one group, and what applies them."""
    style, kind = operations.style, group[0]
    codes, arguments = operations.codes[rows, k], operations.arguments[rows, k]
    if group in (GEOMETRIC, LOOKUP):
        parameters = np.zeros((len(rows), *((2, 3) if group == GEOMETRIC else (6,))))
        for code in np.unique(codes):
            name, own = operations.names[code], codes == code
            parameters[own] = (
                matrices(name, arguments[own], size, style.arithmetic)
                if group == GEOMETRIC
                else point_parameters(name, arguments[own])
            )
        if group == LOOKUP:
            return parameters, lambda images, p: batch_ops.apply_lookup(images, batch_ops.point_tables(p))
        return parameters, lambda images, m: _warp(images, m, parameters, style)
    if kind == "Cutout":
        assert operations.centres is not None
        boxes = np.concatenate([np.floor(operations.centres[rows, k] * np.array(size)), arguments[:, None]], axis=1)
        return boxes, lambda images, b: batch_ops.cutout(images, b[:, :2], b[:, 2], style.fill)
    if kind in _BLENDS:
        return arguments, lambda images, f: _BLENDS[kind](images, f, style.arithmetic)
    if kind in _OTHERS:
        return arguments, _OTHERS[kind]
    raise KeyError(kind)


def _warp(images: Tensor, matrices: Tensor, exact_matrices: Array, style: Style) -> Tensor:
    if images.device.type == "cpu" and images.shape[1] in (1, 3) and style.interpolation != "nearest":
        return batch_ops.affine_pillow(images, exact_matrices, style.fill, style.interpolation)
    return batch_ops.affine(images, matrices, style.fill, style.interpolation)


_BLENDS: dict[str, Callable[[Tensor, Tensor, Arithmetic], Tensor]] = {
    "Color": batch_ops.adjust_saturation,
    "Contrast": batch_ops.adjust_contrast,
    "Sharpness": batch_ops.adjust_sharpness,
}
_OTHERS: dict[str, _Transform] = {
    "AutoContrast": lambda images, _: batch_ops.autocontrast(images),
    "Equalize": lambda images, _: batch_ops.equalize(images),
    "Grayscale": lambda images, _: colour_ops.grayscale(images),
    "GaussianBlur": colour_ops.gaussian_blur,
    "Hue": colour_ops.adjust_hue,
}
