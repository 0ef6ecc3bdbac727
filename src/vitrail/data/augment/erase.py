"""Random erasing: replace a rectangle of a normalised image by the mean colour or by noise."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.rng import Purpose, uniforms
from vitrail.data.augment.spec import Augment
from vitrail.data.types import Array

_TRIES = 10


def draw_erasures(augment: Augment, seed: int, epoch: int, first: int, count: int, size: tuple[int, int]) -> Array:
    """Draw rectangles [n, 5] for the images at positions first, first + 1, …: top, left, bottom, right, noise key.

    Images that are not erased get an empty rectangle.
    """
    numbers = uniforms(seed, epoch, Purpose.ERASE, first, count, 2 * _TRIES + 4)
    low, high = augment.erase_area
    area = size[0] * size[1] * (low + numbers[:, :_TRIES] * (high - low))
    low, high = np.log(augment.erase_aspect)
    aspect = np.exp(low + numbers[:, _TRIES : 2 * _TRIES] * (high - low))  # height / width, as in the paper
    box_h, box_w = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (box_h < size[0]) & (box_w < size[1]) & (box_h >= 1) & (box_w >= 1)
    chosen = fits.argmax(axis=1)[:, None]
    box_h, box_w = (np.take_along_axis(side, chosen, 1)[:, 0] for side in (box_h, box_w))
    top = np.floor(numbers[:, -4] * (size[0] - box_h + 1))
    left = np.floor(numbers[:, -3] * (size[1] - box_w + 1))
    rectangles = np.stack([top, left, top + box_h, left + box_w, np.floor(numbers[:, -1] * 2**24)], axis=1)
    rectangles[~(fits.any(axis=1) & (numbers[:, -2] < augment.erase)), :4] = 0
    return rectangles


def erase(images: Tensor, rectangles: Tensor, *, noise: bool) -> Tensor:
    """Fill the rectangles of normalised images [n, C, H, W] with 0 (the mean) or with standard normal noise."""
    y = torch.arange(images.shape[2], device=images.device)[None, :, None]
    x = torch.arange(images.shape[3], device=images.device)[None, None, :]
    top, left, bottom, right = (side[:, None, None] for side in rectangles[:, :4].unbind(1))
    inside = ((y >= top) & (y < bottom) & (x >= left) & (x < right))[:, None]
    if not noise:
        return images.masked_fill(inside, 0.0)
    return torch.where(inside, normal_noise(rectangles[:, 4].long(), images.shape[1:]), images)


def normal_noise(keys: Tensor, shape: torch.Size) -> Tensor:
    """Return standard normal numbers [n, *shape] that depend on the key of each image alone, without generator state."""
    positions = torch.arange(math.prod(shape), device=keys.device)
    radius, angle = (_hash(keys[:, None] * 2 + half, positions) for half in (0, 1))
    # Box-Muller transform. The hash is never 0, because 0.5 is added before scaling.
    numbers = (-2 * radius.log()).sqrt_() * (2 * math.pi * angle).cos_()
    return numbers.view(-1, *shape)


def _hash(keys: Tensor, positions: Tensor) -> Tensor:
    """Hash to uniform numbers strictly within (0, 1). Values stay below 2³¹, so that no int64 product overflows."""
    value = (keys * 0x9E3779B1 + positions * 0x85EBCA77) & 0x7FFFFFFF
    for shift, odd in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x5BD1E995 & 0x7FFFFFFF)):
        value = ((value ^ (value >> shift)) * odd) & 0x7FFFFFFF
    value = value ^ (value >> 15)
    return (value.float() + 0.5).mul_(2.0**-31).clamp_(2.0**-32, 1 - 2.0**-24)
