"""Resize exactly as the libraries that published weights were trained with.

There are two families. Pillow (and so torchvision and timm) widens its filter when downscaling, and rounds to integers.
TensorFlow (Google's ViTs) by default does not widen the filter and does not round. A model trained with one loses accuracy
with the other, so nothing here has a default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from PIL import Image

from vitrail.data.types import Array

Interpolation = Literal["nearest", "bilinear", "bicubic", "area", "lanczos"]
Rounding = Literal["none", "truncate", "nearest"]
_ResizeBand = Callable[[Array, tuple[int, int], Interpolation], Array]

_PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,
    "lanczos": Image.Resampling.LANCZOS,
}
# CMYK for four channels, because Pillow would premultiply RGBA by alpha.
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_BLOCK = 512
# Pixels of a band. Larger images are resized in several, so that no float copy of the whole is made.
_BAND = 1 << 24
_LINES = 1 << 20  # pixels of a band that is interpolated


def resize(image: Array, size: tuple[int, int], *, interpolation: Interpolation, antialias: bool, rounding: Rounding) -> Array:
    """Resize an image [height, width, channels]; the result is float32 if `rounding` is none, else of the same type."""
    if image.shape[:2] == size:
        return image.astype(np.float32) if rounding == "none" else image
    if not antialias:
        return round_pixels(_resize_tensorflow(image, size, interpolation), rounding, image.dtype)
    if rounding == "nearest" and image.dtype == np.uint8:
        return _in_bands(_resize_pillow_uint8, image, size, interpolation)
    return round_pixels(_in_bands(_resize_pillow_float, image, size, interpolation), rounding, image.dtype)


def round_pixels(pixels: Array, rounding: Rounding, dtype: np.dtype[np.generic]) -> Array:
    """Round float pixel values to integers of `dtype`, or only convert to float32."""
    if rounding == "none":
        return pixels.astype(np.float32)
    # The offset keeps 200 at 200 if the arithmetic gave 199.99999, which would be truncated to 199.
    integers = np.rint(pixels) if rounding == "nearest" else np.floor(pixels + 1e-4)
    return integers.clip(0, np.iinfo(dtype).max).astype(dtype)  # type: ignore[type-var]


def _in_bands(resize_band: _ResizeBand, image: Array, size: tuple[int, int], interpolation: Interpolation) -> Array:
    """Resize a large image in bands of rows, then of columns, so that Pillow's copies are those of a band.

    Pillow also resizes in two passes, first along the rows: the result is the same bit for bit.
    """
    height, width = image.shape[:2]
    if height * width <= _BAND:
        return resize_band(image, size, interpolation)
    bands = np.split(image, range(max(1, _BAND // width), height, max(1, _BAND // width)))
    narrow = np.concatenate([resize_band(band, (len(band), size[1]), interpolation) for band in bands])
    step = max(1, _BAND // height)
    bands = np.split(narrow, range(step, size[1], step), 1)
    return np.concatenate([resize_band(band, (size[0], band.shape[1]), interpolation) for band in bands], 1)


def _resize_pillow_uint8(image: Array, size: tuple[int, int], interpolation: Interpolation) -> Array:
    height, width = size
    channels = image.shape[2]
    if channels not in _MODES:
        planes = [_resize_pillow_uint8(image[:, :, c : c + 1], size, interpolation) for c in range(channels)]
        return np.concatenate(planes, axis=2)
    flat = np.ascontiguousarray(image)
    pil_image = Image.frombuffer(_MODES[channels], (image.shape[1], image.shape[0]), flat, "raw", _MODES[channels], 0, 1)
    return np.asarray(pil_image.resize((width, height), _PILLOW[interpolation])).reshape(height, width, channels)


def _resize_pillow_float(image: Array, size: tuple[int, int], interpolation: Interpolation) -> Array:
    height, width = size
    planes = (Image.fromarray(np.ascontiguousarray(image[:, :, c], np.float32)) for c in range(image.shape[2]))
    return np.stack([np.asarray(plane.resize((width, height), _PILLOW[interpolation])) for plane in planes], axis=2)


def _resize_tensorflow(image: Array, size: tuple[int, int], interpolation: Interpolation) -> Array:
    """Resize without antialiasing, pixel centres at half integers, as tf.image.resize of TensorFlow 2."""
    if interpolation == "area":
        return _area(_area(image, size[0], axis=0), size[1], axis=1)
    if interpolation in ("bicubic", "lanczos"):
        rows, columns = (_weights(image.shape[k], size[k], interpolation) for k in (0, 1))
        if image.shape[0] * image.shape[1] > _BAND:  # most pixels of a large image have no weight at all
            used = rows.any(0), columns.any(0)
            image, rows, columns = image[used[0]][:, used[1]], rows[:, used[0]], columns[:, used[1]]
        filtered: Array = np.einsum("yh,hwc,xw->yxc", rows, image.astype(np.float32), columns, optimize=True)
        return filtered
    return (_nearest if interpolation == "nearest" else _bilinear)(image, size)


def _nearest(image: Array, size: tuple[int, int]) -> Array:
    rows, columns = (np.minimum(_scaled(image.shape[k], size[k]).astype(np.int64), image.shape[k] - 1) for k in (0, 1))
    found: Array = image[rows[:, None], columns].astype(np.float32)
    return found


def _bilinear(image: Array, size: tuple[int, int]) -> Array:
    """Interpolate between the four nearest pixels, in bands of rows: only pixels that are used become float."""
    (above, below, down), (left, right, across) = (_neighbours(image.shape[k], size[k]) for k in (0, 1))
    across, resized = across[:, None], np.empty((*size, image.shape[2]), np.float32)
    step = max(1, _LINES // size[1])
    for top in range(0, size[0], step):
        band = slice(top, top + step)
        upper, lower = (
            image[rows[band, None], left] * (1 - across) + image[rows[band, None], right] * across for rows in (above, below)
        )
        resized[band] = upper + (lower - upper) * down[band, None, None]
    return resized


def _neighbours(old: int, new: int) -> tuple[Array, Array, Array]:
    """Return, for each new position, the two old ones next to it and the weight of the second; float32, as in TensorFlow."""
    centres = np.maximum(_scaled(old, new) - np.float32(0.5), np.float32(0))
    first = np.minimum(centres.astype(np.int64), old - 1)
    return first, np.minimum(first + 1, old - 1), centres - first.astype(np.float32)


def _scaled(old: int, new: int) -> Array:
    """Return the centres of new pixels in the old image, whose first pixel is from 0 to 1."""
    centres: Array = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * (np.float32(old) / np.float32(new))
    return centres


def _area(image: Array, length: int, axis: int) -> Array:
    """Average over the exact, fractional area of each output pixel, by differences of the cumulative sum.

    In blocks along the other axis, because the sums are float64: those of a whole large photograph take gigabytes.
    """
    across = 1 - axis
    blocks = np.split(image, range(_BLOCK, image.shape[across], _BLOCK), across)
    return np.concatenate([_area_of_block(block.astype(np.float32), length, axis) for block in blocks], across)


def _area_of_block(image: Array, length: int, axis: int) -> Array:
    sums = np.concatenate([np.zeros_like(image.take([0], axis), np.float64), image.cumsum(axis, np.float64)], axis)
    edges = np.arange(length + 1) * (image.shape[axis] / length)
    below = np.minimum(edges.astype(np.int64), image.shape[axis] - 1)
    fraction = (edges - below).reshape([-1 if k == axis else 1 for k in range(image.ndim)])
    at_edges = sums.take(below, axis) * (1 - fraction) + sums.take(below + 1, axis) * fraction
    means: Array = np.diff(at_edges, axis=axis) * (length / image.shape[axis])
    return means.astype(np.float32)


def _weights(old: int, new: int, interpolation: Interpolation) -> Array:
    """Return [new, old]: the weight of each old pixel in each new one; taps beyond the edge are dropped."""
    centres = (np.arange(new)[:, None] + 0.5) * (old / new) - 0.5
    distance = np.abs(centres - np.arange(old)[None])
    if interpolation == "lanczos":
        weights = np.where(distance < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)
    else:  # Keys' cubic with a = -1/2, as in TensorFlow and Pillow (torch's interpolate uses -3/4)
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    normalised: Array = weights / weights.sum(1, keepdims=True)
    return normalised.astype(np.float32)
