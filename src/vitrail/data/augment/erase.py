"""Random erasing: a rectangle of a normalised image replaced by the mean colour or by noise."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.spec import Augment
from vitrail.data.augment.streams import Stream, uniforms
from vitrail.data.types import Array

_TRIES = 10


def draw_erasures(augment: Augment, seed: int, epoch: int, first: int, count: int, size: tuple[int, int]) -> Array:
    """Rectangles [n, 5] for the images at positions first, …: top, left, bottom, right and a key for the noise.

    Those that stay whole have an empty rectangle.
    """
    numbers = uniforms(seed, epoch, Stream.ERASE, first, count, 2 * _TRIES + 4)
    low, high = augment.erase_area
    area = size[0] * size[1] * (low + numbers[:, :_TRIES] * (high - low))
    flat, tall_most = np.log(augment.erase_aspect)
    aspect = np.exp(flat + numbers[:, _TRIES : 2 * _TRIES] * (tall_most - flat))  # height / width, as its authors have it
    tall, wide = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (tall < size[0]) & (wide < size[1]) & (tall >= 1) & (wide >= 1)
    chosen = fits.argmax(axis=1)[:, None]
    tall, wide = (np.take_along_axis(side, chosen, 1)[:, 0] for side in (tall, wide))
    top = np.floor(numbers[:, -4] * (size[0] - tall + 1))
    left = np.floor(numbers[:, -3] * (size[1] - wide + 1))
    rectangles = np.stack([top, left, top + tall, left + wide, np.floor(numbers[:, -1] * 2**24)], axis=1)
    rectangles[~(fits.any(axis=1) & (numbers[:, -2] < augment.erase)), :4] = 0
    return rectangles


def erase(images: Tensor, rectangles: Tensor, *, noise: bool) -> Tensor:
    """Normalised images [n, C, H, W] with their rectangles filled: with 0, the mean, or with standard normal noise."""
    y = torch.arange(images.shape[2], device=images.device)[None, :, None]
    x = torch.arange(images.shape[3], device=images.device)[None, None, :]
    top, left, bottom, right = (side[:, None, None] for side in rectangles[:, :4].unbind(1))
    inside = ((y >= top) & (y < bottom) & (x >= left) & (x < right))[:, None]
    if not noise:
        return images.masked_fill(inside, 0.0)
    return torch.where(inside, normal_noise(rectangles[:, 4].long(), images.shape[1:]), images)


def normal_noise(keys: Tensor, shape: torch.Size) -> Tensor:
    """Standard normal numbers [n, *shape], a function of each image's key alone: no generator has a state to keep."""
    places = torch.arange(math.prod(shape), device=keys.device)
    radius, angle = (_hash(keys[:, None] * 2 + half, places) for half in (0, 1))
    # Box and Muller's: never the logarithm of 0, since the hash is moved to the middle of its step.
    numbers = (-2 * radius.log()).sqrt_() * (2 * math.pi * angle).cos_()
    return numbers.view(-1, *shape)


def _hash(keys: Tensor, places: Tensor) -> Tensor:
    """Uniform numbers strictly within (0, 1) by mixing bits, in 64-bit integers that never leave 31 bits and a factor."""
    value = (keys * 0x9E3779B1 + places * 0x85EBCA77) & 0x7FFFFFFF
    for shift, odd in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x5BD1E995 & 0x7FFFFFFF)):
        value = ((value ^ (value >> shift)) * odd) & 0x7FFFFFFF
    value = value ^ (value >> 15)
    return (value.float() + 0.5).mul_(2.0**-31).clamp_(2.0**-32, 1 - 2.0**-24)
