"""RandAugment on a batch: images that got the same kind of operation go through it together.

The decisions are known on the host, so the batch can be sorted into groups without asking the device anything; all the
small arrays travel to it in one copy.
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
    LOOKED_UP,
    OPERATIONS,
    Operations,
    factor,
    lookup_table,
    matrices,
    strength,
)
from vitrail.data.augment.spec import RandAugmentVariant
from vitrail.data.types import Array

_Change = Callable[[Tensor, Tensor], Tensor]


class Courier:
    """Carries many small arrays to a device in one copy from pinned memory, which no earlier work has to wait for."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []

    def add(self, array: Array) -> int:
        """Hand in an array of numbers (whole ones below 2²⁴); the answer is its place in what `deliver` returns."""
        self._arrays.append(np.asarray(array, dtype=np.float32))
        return len(self._arrays) - 1

    def deliver(self, device: torch.device) -> list[Tensor]:
        sizes = [array.size for array in self._arrays]
        if not sizes:
            return []
        packed = torch.from_numpy(np.concatenate([array.ravel() for array in self._arrays]))
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        return [part.view(array.shape) for part, array in zip(torch.split(packed.to(device), sizes), self._arrays, strict=True)]


def plan_randaugment(
    courier: Courier, operations: Operations, size: tuple[int, int], device: torch.device
) -> list[tuple[int, int, _Change]]:
    """Pack what every group needs; each entry is (place of its rows, place of its parameters, what to do with both)."""
    plan: list[tuple[int, int, _Change]] = []
    for turn in range(operations.codes.shape[1]):
        codes, signs, spots = operations.codes[:, turn], operations.signs[:, turn], operations.spots[:, turn]
        names = np.array(OPERATIONS[operations.variant])[codes]
        for kinds in _GROUPS:
            rows = np.flatnonzero(np.isin(names, kinds))
            if len(rows):
                parameters, change = _group(operations, names[rows], signs[rows], spots[rows], size, device)
                plan.append((courier.add(rows), courier.add(parameters), change))
    return plan


def run_randaugment(images: Tensor, plan: list[tuple[int, int, _Change]], parcels: list[Tensor]) -> Tensor:
    """Apply a plan to uint8 images [n, C, H, W], in place."""
    for rows, parameters, change in plan:
        index = parcels[rows].long()
        images.index_copy_(0, index, change(images.index_select(0, index), parcels[parameters]))
    return images


def randaugment(images: Tensor, operations: Operations) -> Tensor:
    """RandAugment as decided, in place, wherever the images are."""
    courier = Courier()
    plan = plan_randaugment(courier, operations, (images.shape[2], images.shape[3]), images.device)
    return run_randaugment(images, plan, courier.deliver(images.device))


_GROUPS = (GEOMETRIC, LOOKED_UP, ("Color",), ("Contrast",), ("Sharpness",), ("AutoContrast",), ("Equalize",), ("Cutout",))


def _group(
    operations: Operations, names: Array, signs: Array, spots: Array, size: tuple[int, int], device: torch.device
) -> tuple[Array, _Change]:
    variant, magnitude = operations.variant, operations.magnitude
    kind = str(names[0])
    fill, reference = FILL[variant], variant == "big-vision"
    amount = strength(variant, kind, magnitude, size)
    if kind in GEOMETRIC:
        places = np.zeros((len(names), 2, 3))
        for name in set(names.tolist()):
            here = names == name
            places[here] = matrices(variant, name, strength(variant, name, magnitude, size), signs[here], size)
        return places, lambda images, where: batch_ops.affine(images, where, fill)
    if kind in LOOKED_UP:
        number = np.array([LOOKED_UP.index(name) * 2 for name in names]) + (signs > 0)
        tables = _tables(variant, magnitude, device)
        return number, lambda images, which: batch_ops.look_up(images, tables[which.long()])
    if kind == "Color":
        return factor(variant, amount, signs), lambda images, f: batch_ops.saturate(images, f, reference=reference)
    if kind == "Contrast":
        return factor(variant, amount, signs), lambda images, f: batch_ops.contrast(images, f, reference=reference)
    if kind == "Sharpness":
        return factor(variant, amount, signs), lambda images, f: batch_ops.sharpen(images, f, reference=reference)
    if kind == "Cutout":
        centres = np.floor(spots * np.array(size))
        return centres, lambda images, where: batch_ops.cut_out(images, where, int(amount), fill)
    change = batch_ops.autocontrast if kind == "AutoContrast" else batch_ops.equalize
    return np.zeros(0), lambda images, _: change(images)


@lru_cache(maxsize=32)
def _tables(variant: RandAugmentVariant, magnitude: float, device: torch.device) -> Tensor:
    """Two rows for each looked-up operation, weakening and strengthening; the strength is one for the whole run."""
    rows = []
    for name in LOOKED_UP:
        amount = strength(variant, name, magnitude, (1, 1))
        signs = np.array([-1.0, 1.0])
        arguments = factor(variant, amount, signs) if name == "Brightness" else np.full(2, amount)
        rows += [lookup_table(name, float(argument)) for argument in arguments]
    return torch.from_numpy(np.stack(rows)).to(device)
