"""Which part of an image is cut out: the inception crop, for a whole batch at once.

Boxes are int64 [n, 4]: top, left, height, width.
"""

from __future__ import annotations

import numpy as np

from vitrail.data.augment.spec import Augment
from vitrail.data.augment.streams import Floats, Stream, uniforms
from vitrail.data.types import Array

_TRIES = 10
_DRAWS = 2 * _TRIES + 2


def draw_boxes(augment: Augment, seed: int, epoch: int, first: int, heights: Array, widths: Array) -> Array:
    """The boxes of the images at positions first, first + 1, … of an epoch, whose sizes are given."""
    numbers = uniforms(seed, epoch, Stream.CROP, first, len(heights), _DRAWS)
    rows, columns = heights.astype(np.float64)[:, None], widths.astype(np.float64)[:, None]
    sizes = _even_area if augment.crop == "inception" else _even_height
    tall, wide, fits = sizes(augment, numbers[:, :_TRIES], numbers[:, _TRIES : 2 * _TRIES], rows, columns)
    chosen = fits.argmax(axis=1)[:, None]  # the first try that fits, as a loop would have found
    tall, wide = (np.take_along_axis(side, chosen, 1)[:, 0] for side in (tall, wide))
    missed = ~fits.any(axis=1)
    if missed.any():
        middle = _middle(augment, heights[missed], widths[missed])
        tall[missed], wide[missed] = middle[:, 2], middle[:, 3]
    # torchvision places a crop on any of the H − h + 1 rows; TensorFlow leaves the last one out.
    places = 1 if augment.crop == "inception" else 0
    top = np.floor(numbers[:, -2] * np.maximum(heights - tall + places, 1))
    left = np.floor(numbers[:, -1] * np.maximum(widths - wide + places, 1))
    boxes = np.stack([top, left, tall, wide], axis=1).astype(np.int64)
    if missed.any():
        boxes[missed] = middle
    return boxes


def draw_flips(augment: Augment, seed: int, epoch: int, first: int, count: int) -> Array:
    """Which of the images are flipped left to right."""
    flips: Array = uniforms(seed, epoch, Stream.FLIP, first, count, 1)[:, 0] < augment.flip
    return flips


def _even_area(augment: Augment, u: Floats, v: Floats, rows: Floats, columns: Floats) -> tuple[Floats, Floats, Array]:
    """torchvision's and timm's: the share of the area is uniform, the logarithm of the aspect ratio too."""
    area = rows * columns * (augment.crop_area[0] + u * (augment.crop_area[1] - augment.crop_area[0]))
    low, high = np.log(augment.crop_aspect)
    aspect = np.exp(low + v * (high - low))
    tall, wide = np.rint(np.sqrt(area / aspect)), np.rint(np.sqrt(area * aspect))
    return tall, wide, (tall >= 1) & (wide >= 1) & (tall <= rows) & (wide <= columns)


def _even_height(augment: Augment, u: Floats, v: Floats, rows: Floats, columns: Floats) -> tuple[Floats, Floats, Array]:
    """TensorFlow's `sample_distorted_bounding_box`: the aspect ratio is uniform, then the height among those allowed."""
    aspect = augment.crop_aspect[0] + v * (augment.crop_aspect[1] - augment.crop_aspect[0])
    least, most = (share * rows * columns for share in augment.crop_area)
    highest = np.rint(np.sqrt(most / aspect))
    too_wide = np.rint(highest * aspect) > columns
    highest = np.where(too_wide, np.floor((columns + 0.5 - 1e-7) / aspect), highest)
    highest = np.minimum(highest, rows)
    lowest = np.minimum(np.rint(np.sqrt(least / aspect)), highest)
    tall = lowest + np.floor(u * (highest - lowest + 1))
    wide = np.rint(tall * aspect)
    # Rounding may leave the area a hair outside its limits: one row more or less mends that.
    tall = tall + (tall * wide < least)
    wide = np.rint(tall * aspect)
    tall = tall - (tall * wide > most)
    wide = np.rint(tall * aspect)
    inside = (tall * wide >= least) & (tall * wide <= most)
    return tall, wide, inside & (tall >= 1) & (wide >= 1) & (tall <= rows) & (wide <= columns)


def _middle(augment: Augment, heights: Array, widths: Array) -> Array:
    """What is taken where no try fits, as from a panorama: the largest allowed middle, or in the reference all of it."""
    tall, wide = heights.astype(np.int64), widths.astype(np.int64)
    if augment.crop == "inception":
        low, high = augment.crop_aspect
        wide = np.minimum(widths, np.rint(heights * high)).astype(np.int64)
        tall = np.minimum(heights, np.rint(widths / low)).astype(np.int64)
    return np.stack([(heights - tall) // 2, (widths - wide) // 2, np.maximum(tall, 1), np.maximum(wide, 1)], axis=1)
