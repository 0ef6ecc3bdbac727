"""Resizing as the libraries that published weights come from do it, to the pixel.

Two families exist. Pillow (and with it torchvision and timm) widens its filter when it shrinks an image, and rounds
to whole pixel values. TensorFlow (Google's ViTs) by default samples without widening and hands on fractions. A model
trained with one loses accuracy with the other, so nothing here is left to a default.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from vitrail.data.types import Array

Interpolation = Literal["nearest", "bilinear", "bicubic", "area", "lanczos"]
Rounding = Literal["none", "truncate", "nearest"]

_PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,
    "lanczos": Image.Resampling.LANCZOS,
}
# Four channels travel as CMYK because Pillow would weigh the colours of RGBA by their alpha.
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


def resize(image: Array, size: tuple[int, int], *, interpolation: Interpolation, antialias: bool, rounding: Rounding) -> Array:
    """An image [height, width, channels] at another size; float32 where `rounding` is none, else the type it had."""
    if image.shape[:2] == size:
        return image.astype(np.float32) if rounding == "none" else image
    if antialias and rounding == "nearest" and image.dtype == np.uint8:
        return _pillow_bytes(image, size, interpolation)
    sampled = (_pillow_floats if antialias else _plain)(image.astype(np.float32), size, interpolation)
    return rounded(sampled, rounding, image.dtype)


def rounded(pixels: Array, rounding: Rounding, dtype: np.dtype[np.generic]) -> Array:
    """Floating pixel values as whole ones of `dtype`, or left alone."""
    if rounding == "none":
        return pixels.astype(np.float32)
    # The small step up keeps 200 at 200 where the arithmetic came to 199.99999 and would be cut to 199.
    whole = np.rint(pixels) if rounding == "nearest" else np.floor(pixels + 1e-4)
    return whole.clip(0, np.iinfo(dtype).max).astype(dtype)  # type: ignore[type-var]


def _pillow_bytes(image: Array, size: tuple[int, int], interpolation: Interpolation) -> Array:
    height, width = size
    channels = image.shape[2]
    if channels not in _MODES:
        planes = [_pillow_bytes(image[:, :, c : c + 1], size, interpolation) for c in range(channels)]
        return np.concatenate(planes, axis=2)
    flat = np.ascontiguousarray(image)
    picture = Image.frombuffer(_MODES[channels], (image.shape[1], image.shape[0]), flat, "raw", _MODES[channels], 0, 1)
    return np.asarray(picture.resize((width, height), _PILLOW[interpolation])).reshape(height, width, channels)


def _pillow_floats(image: Array, size: tuple[int, int], interpolation: Interpolation) -> Array:
    height, width = size
    planes = [
        np.asarray(Image.fromarray(np.ascontiguousarray(image[:, :, c])).resize((width, height), _PILLOW[interpolation]))
        for c in range(image.shape[2])
    ]
    return np.stack(planes, axis=2)


def _plain(image: Array, size: tuple[int, int], interpolation: Interpolation) -> Array:
    """Without antialiasing, pixel centres at half integers: tf.image.resize of TensorFlow 2."""
    if interpolation == "area":
        return _area(_area(image, size[0], axis=0), size[1], axis=1)
    if interpolation in ("bicubic", "lanczos"):
        rows, columns = (_weights(image.shape[k], size[k], interpolation) for k in (0, 1))
        filtered: Array = np.einsum("yh,hwc,xw->yxc", rows, image, columns, optimize=True)
        return filtered
    mode = "nearest-exact" if interpolation == "nearest" else "bilinear"
    planes = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
    return F.interpolate(planes, size, mode=mode)[0].permute(1, 2, 0).contiguous().numpy()


def _area(image: Array, length: int, axis: int) -> Array:
    """The mean over each output pixel's exact, fractional share of the input, read off the running sum."""
    sums = np.concatenate([np.zeros_like(image.take([0], axis), np.float64), image.cumsum(axis, np.float64)], axis)
    edges = np.arange(length + 1) * (image.shape[axis] / length)
    below = np.minimum(edges.astype(np.int64), image.shape[axis] - 1)
    share = (edges - below).reshape([-1 if k == axis else 1 for k in range(image.ndim)])
    at_edges = sums.take(below, axis) * (1 - share) + sums.take(below + 1, axis) * share
    means: Array = np.diff(at_edges, axis=axis) * (length / image.shape[axis])
    return means.astype(np.float32)


def _weights(old: int, new: int, interpolation: Interpolation) -> Array:
    """Row i says how much each of `old` pixels gives to pixel i of `new`; taps beyond the edge are left out."""
    centres = (np.arange(new)[:, None] + 0.5) * (old / new) - 0.5
    distance = np.abs(centres - np.arange(old)[None])
    if interpolation == "lanczos":
        weights = np.where(distance < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)
    else:  # Keys' cubic with a = -1/2, which is TensorFlow's and Pillow's (torch's own interpolate takes -3/4)
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    normalised: Array = weights / weights.sum(1, keepdims=True)
    return normalised.astype(np.float32)
