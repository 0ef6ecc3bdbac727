"""Draw random crop boxes and flips, for a whole batch at once.

Boxes are int64 [n, 4]: top, left, height, width.
"""

from __future__ import annotations

import numpy as np

from vitrail.data.augment.rng import Floats, Purpose, uniforms
from vitrail.data.augment.spec import Augment
from vitrail.data.types import Array

_TRIES = 10
_DRAWS = 2 * _TRIES + 2


def draw_boxes(augment: Augment, seed: int, epoch: int, first: int, heights: Array, widths: Array) -> Array:
    """Draw the boxes of the images at positions first, first + 1, … of an epoch, given their sizes."""
    numbers = uniforms(seed, epoch, Purpose.CROP, first, len(heights), _DRAWS)
    rows, columns = heights.astype(np.float64)[:, None], widths.astype(np.float64)[:, None]
    sizes = {"inception": _uniform_area, "inception-tensorflow": _uniform_height, "same-aspect": _same_aspect}[augment.crop]
    box_h, box_w, fits = sizes(augment, numbers[:, :_TRIES], numbers[:, _TRIES : 2 * _TRIES], rows, columns)
    chosen = fits.argmax(axis=1)[:, None]  # the first try that fits, as in a loop
    box_h, box_w = (np.take_along_axis(side, chosen, 1)[:, 0] for side in (box_h, box_w))
    missed = ~fits.any(axis=1)
    if missed.any():
        fallback = _fallback_boxes(augment, heights[missed], widths[missed])
        box_h[missed], box_w[missed] = fallback[:, 2], fallback[:, 3]
    # torchvision draws the top from all H − h + 1 rows; TensorFlow excludes the last one.
    extra = 0 if augment.crop == "inception-tensorflow" else 1
    top = np.floor(numbers[:, -2] * np.maximum(heights - box_h + extra, 1))
    left = np.floor(numbers[:, -1] * np.maximum(widths - box_w + extra, 1))
    boxes = np.stack([top, left, box_h, box_w], axis=1).astype(np.int64)
    if missed.any():
        boxes[missed] = fallback
    return boxes


def draw_flips(augment: Augment, seed: int, epoch: int, first: int, count: int) -> Array:
    """Draw which images are flipped left to right."""
    flips: Array = uniforms(seed, epoch, Purpose.FLIP, first, count, 1)[:, 0] < augment.flip
    return flips


def _uniform_area(augment: Augment, u: Floats, v: Floats, rows: Floats, columns: Floats) -> tuple[Floats, Floats, Array]:
    """Draw box sizes as torchvision and timm do: uniform area, and uniform logarithm of the aspect ratio."""
    area = rows * columns * (augment.crop_area[0] + u * (augment.crop_area[1] - augment.crop_area[0]))
    low, high = np.log(augment.crop_aspect)
    aspect = np.exp(low + v * (high - low))
    box_h, box_w = np.rint(np.sqrt(area / aspect)), np.rint(np.sqrt(area * aspect))
    return box_h, box_w, (box_h >= 1) & (box_w >= 1) & (box_h <= rows) & (box_w <= columns)


def _uniform_height(augment: Augment, u: Floats, v: Floats, rows: Floats, columns: Floats) -> tuple[Floats, Floats, Array]:
    """Draw box sizes as TensorFlow's `sample_distorted_bounding_box`: uniform aspect ratio, then uniform height."""
    aspect = augment.crop_aspect[0] + v * (augment.crop_aspect[1] - augment.crop_aspect[0])
    min_area, max_area = (area * rows * columns for area in augment.crop_area)
    max_h = np.rint(np.sqrt(max_area / aspect))
    too_wide = np.rint(max_h * aspect) > columns
    max_h = np.where(too_wide, np.floor((columns + 0.5 - 1e-7) / aspect), max_h)
    max_h = np.minimum(max_h, rows)
    min_h = np.minimum(np.rint(np.sqrt(min_area / aspect)), max_h)
    box_h = min_h + np.floor(u * (max_h - min_h + 1))
    box_w = np.rint(box_h * aspect)
    # Rounding may put the area slightly outside its limits; one row more or less corrects that.
    box_h = box_h + (box_h * box_w < min_area)
    box_w = np.rint(box_h * aspect)
    box_h = box_h - (box_h * box_w > max_area)
    box_w = np.rint(box_h * aspect)
    inside = (box_h * box_w >= min_area) & (box_h * box_w <= max_area)
    return box_h, box_w, inside & (box_h >= 1) & (box_w >= 1) & (box_h <= rows) & (box_w <= columns)


def _same_aspect(augment: Augment, u: Floats, v: Floats, rows: Floats, columns: Floats) -> tuple[Floats, Floats, Array]:
    """Draw boxes of the image's own aspect ratio: a square resize and a random square crop of it, in one step."""
    side = np.sqrt(augment.crop_area[0] + u * (augment.crop_area[1] - augment.crop_area[0]))
    box_h, box_w = (np.maximum(1, np.rint(side * length)) for length in (rows, columns))
    return box_h, box_w, np.ones_like(box_h, dtype=bool)


def _fallback_boxes(augment: Augment, heights: Array, widths: Array) -> Array:
    """Return the boxes used if no try fits, as in a panorama: the largest allowed centre crop, or the whole image (TensorFlow)."""
    box_h, box_w = heights.astype(np.int64), widths.astype(np.int64)
    if augment.crop == "inception":
        low, high = augment.crop_aspect
        box_w = np.minimum(widths, np.rint(heights * high)).astype(np.int64)
        box_h = np.minimum(heights, np.rint(widths / low)).astype(np.int64)
    return np.stack([(heights - box_h) // 2, (widths - box_w) // 2, np.maximum(box_h, 1), np.maximum(box_w, 1)], axis=1)
