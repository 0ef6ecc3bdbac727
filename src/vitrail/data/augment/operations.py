"""Image operations as they were drawn: which ones, with which arguments, for which images of a batch.

RandAugment, TrivialAugment, 3-Augment and colour jitter differ only in how operations and arguments are drawn. Here are
the names of the operations, what their arguments mean, and the parameters computed from them for a whole batch.

| operation | argument |
|---|---|
| ShearX, ShearY | input column (row) per output row (column) |
| TranslateX, TranslateY | pixels from output to input |
| Rotate | degrees |
| Brightness, Contrast, Color, Sharpness | weight of the image against black, its mean grey, its grey image, its smoothed image |
| Posterize | bits that stay |
| Solarize | values from this threshold on are inverted |
| SolarizeAdd | added to values below 128 |
| Cutout | half a side of the square |
| Hue | part of the colour circle |
| GaussianBlur | standard deviation in pixels |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitrail.data.types import Array

Arithmetic = Literal["torchvision", "tensorflow", "pillow"]
WarpInterpolation = Literal["nearest", "bilinear", "bicubic"]

GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
LOOKUP = ("Brightness", "Posterize", "Solarize", "SolarizeAdd", "Invert")
SKIPPED = -1
"""Code of an operation that is not applied."""


@dataclass(frozen=True)
class Style:
    """Whose rules operations follow; the same for all images of a run."""

    arithmetic: Arithmetic
    """Rounding, and how colours are averaged."""
    fill: tuple[int, ...]
    """Colour of empty areas, one value per channel."""
    interpolation: WarpInterpolation = "nearest"


@dataclass(frozen=True)
class Operations:
    """The operations for n images, in order. Arrays are [n, count], the centres of Cutout [n, count, 2]."""

    names: tuple[str, ...]
    codes: Array
    """Index into `names`, or `SKIPPED`."""
    arguments: Array
    style: Style
    centres: Array | None = None
    """Centre of Cutout, (row, column) from 0 to 1."""


def concatenate(parts: Sequence[Operations]) -> Operations:
    """Join the operations of consecutive images, which were drawn with the same settings."""
    first = parts[0]
    codes, arguments = (np.concatenate([getattr(part, field) for part in parts]) for field in ("codes", "arguments"))
    centres = [part.centres for part in parts if part.centres is not None]
    return Operations(first.names, codes, arguments, first.style, np.concatenate(centres) if centres else None)


def matrices(name: str, values: Array, size: tuple[int, int], arithmetic: Arithmetic) -> Array:
    """Return affine matrices [n, 2, 3], from output to input coordinates, with the origin at the centre."""
    height, width = size
    result = np.zeros((len(values), 2, 3))
    result[:, 0, 0] = result[:, 1, 1] = 1
    # A shear fixes the top (left) edge: in torchvision and Pillow its border, in TensorFlow the centres of the first pixels.
    edge = 1 if arithmetic == "tensorflow" else 0
    if name == "ShearX":
        result[:, 0, 1], result[:, 0, 2] = values, values * (height - edge) / 2
    elif name == "ShearY":
        result[:, 1, 0], result[:, 1, 2] = values, values * (width - edge) / 2
    elif name == "TranslateX":
        result[:, 0, 2] = values
    elif name == "TranslateY":
        result[:, 1, 2] = values
    elif name == "Rotate":
        cosine, sine = np.cos(np.radians(values)), np.sin(np.radians(values))
        result[:, 0, 0], result[:, 0, 1], result[:, 1, 0], result[:, 1, 1] = cosine, -sine, sine, cosine
    else:
        raise KeyError(name)
    return result


def point_parameters(name: str, arguments: Array) -> Array:
    """Return the parameters [n, 6] of `batch_ops.point_tables` for an operation that works pixel by pixel."""
    result = np.tile(np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0]), (len(arguments), 1))  # threshold, below, above, step
    if name == "Brightness":
        result[:, 3] = arguments
    elif name == "Posterize":
        result[:, 5] = 2.0 ** (8 - arguments)
    elif name in ("Solarize", "Invert"):
        result[:, 0] = arguments if name == "Solarize" else 0.0
        result[:, 3], result[:, 4] = -1.0, 255.0
    elif name == "SolarizeAdd":
        result[:, 0], result[:, 2] = 128.0, arguments
    else:
        raise KeyError(name)
    return result
