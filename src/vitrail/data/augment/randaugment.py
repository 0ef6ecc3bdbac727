"""Draw RandAugment operations: which ones, how strong, with which sign.

There are three variants. `torchvision` has torchvision's 14 operations and magnitudes 0 to 30. `big-vision` has the 16
operations of the code for "How to train your ViT": magnitude 10 is full strength and larger ones extrapolate, no
operation is the identity (so magnitude 0 still changes images), and empty areas are filled with grey (128), not black.
`timm` has timm's 15 operations and magnitudes 0 to 10: an operation is applied with a probability (0.5), its magnitude may
be drawn from a normal distribution, empty areas get the mean colour of the preprocessing, and images are interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from vitrail.data.augment.rng import Purpose, uniforms
from vitrail.data.augment.spec import Augment, RandAugmentVariant
from vitrail.data.types import Array

WarpInterpolation = Literal["nearest", "bilinear", "bicubic"]

OPERATIONS: dict[RandAugmentVariant, tuple[str, ...]] = {
    "none": (),
    "torchvision": (
        *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness"),
        *("Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
    ),
    "big-vision": (
        *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast"),
        *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
    ),
    "timm": (
        *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color"),
        *("Contrast", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY"),
    ),
}
SKIPPED = -1
"""Code of an operation that is not applied."""

GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
LOOKUP = ("Brightness", "Posterize", "Solarize", "SolarizeAdd", "Invert")
ENHANCE = ("Brightness", "Color", "Contrast", "Sharpness")


@dataclass(frozen=True)
class Rules:
    """What a variant's operations do; the same for all images of a run."""

    variant: RandAugmentVariant
    fill: tuple[int, ...]
    """Colour of empty areas, one value per channel."""
    increasing: bool = False
    """timm: a larger magnitude always means a stronger change."""
    interpolation: WarpInterpolation = "nearest"

    @classmethod
    def of(cls, augment: Augment, mean: tuple[float, ...]) -> Rules:
        """Return the rules for images with this mean (pixel values from 0 to 1, one per channel)."""
        if augment.randaugment == "timm":
            fill = tuple(min(255, round(255 * value)) for value in mean)
            return cls("timm", fill, augment.randaugment_increasing, augment.interpolation)
        return cls(augment.randaugment, (128 if augment.randaugment == "big-vision" else 0,) * len(mean))


@dataclass(frozen=True)
class Operations:
    """The operations for n images, in order. Arrays are [n, count], the centres of Cutout [n, count, 2]."""

    rules: Rules
    codes: Array
    """Index into the variant's operations, or `SKIPPED`."""
    magnitudes: Array
    signs: Array
    centres: Array


def draw_operations(augment: Augment, mean: tuple[float, ...], seed: int, epoch: int, first: int, count: int) -> Operations:
    """Draw the operations for the images at positions first, first + 1, … of an epoch."""
    per_image, names = augment.randaugment_count, OPERATIONS[augment.randaugment]
    numbers = uniforms(seed, epoch, Purpose.RANDAUGMENT, first, count, per_image * 4).reshape(count, per_image, 4)
    codes = np.floor(numbers[..., 0] * len(names)).astype(np.int64)
    magnitudes = np.full(codes.shape, augment.randaugment_magnitude)
    if augment.operation_probability < 1 or augment.randaugment_deviation > 0:
        more = uniforms(seed, epoch, Purpose.MAGNITUDE, first, count, per_image * 2).reshape(count, per_image, 2)
        codes[more[..., 0] >= augment.operation_probability] = SKIPPED
        if augment.randaugment_deviation > 0:
            normal = torch.special.ndtri(torch.from_numpy(more[..., 1]).clamp(min=2.0**-54)).numpy()
            magnitudes = np.clip(magnitudes + augment.randaugment_deviation * normal, 0, 10)
    signs = np.where(numbers[..., 1] < 0.5, -1.0, 1.0)
    return Operations(Rules.of(augment, mean), codes, magnitudes, signs, numbers[..., 2:])


def strength(rules: Rules, name: str, magnitudes: Array, size: tuple[int, int]) -> Array:
    """Return the unsigned arguments of an operation for images of this (height, width), in the operation's unit."""
    height, width = size
    if rules.variant == "torchvision":
        level = magnitudes / 30
        if name in ("ShearX", "ShearY"):
            return 0.3 * level
        if name in ("TranslateX", "TranslateY"):
            return np.floor(150.0 / 331.0 * (width if name == "TranslateX" else height) * level)
        if name == "Posterize":
            return np.rint(8 - 4 * level)
        if name == "Solarize":
            return 255.0 * (1 - level)
        return 30.0 * level if name == "Rotate" else 0.9 * level
    level, timm = magnitudes / 10, rules.variant == "timm"
    if name in ("ShearX", "ShearY"):
        return 0.3 * level
    if name in ("TranslateX", "TranslateY"):
        return 0.45 * (width if name == "TranslateX" else height) * level if timm else 100.0 * level
    if name == "Rotate":
        return 30.0 * level
    if name in ENHANCE:
        return 0.9 * level if rules.increasing else 1.8 * level + 0.1
    if name == "Posterize":  # bits that stay; timm keeps none at its largest (or smallest) magnitude
        bits = np.floor(level * 4)
        # TensorFlow clamps a shift to the bits of the type minus one, so at least one bit always stays.
        return (4 - bits if rules.increasing else bits) if timm else np.clip(bits, 1, 8)
    if name == "Solarize":
        threshold = np.floor(level * 256)
        return 256 - threshold if rules.increasing else threshold
    if name == "SolarizeAdd":
        return np.floor(level * 110)
    return np.floor(level * 40)  # Cutout; the other operations have no argument


def factor(rules: Rules, amounts: Array, signs: Array) -> Array:
    """Return the weights of the images against their degenerate versions: 1 ± the amounts, or the amounts themselves."""
    if rules.variant == "torchvision":
        return 1 + signs * amounts
    return np.maximum(1 + signs * amounts, 0.1) if rules.increasing else amounts


def matrices(rules: Rules, name: str, amounts: Array, signs: Array, size: tuple[int, int]) -> Array:
    """Return affine matrices [n, 2, 3], from output to input coordinates, with the origin at the centre."""
    height, width = size
    values = signs * amounts
    result = np.zeros((len(values), 2, 3))
    result[:, 0, 0] = result[:, 1, 1] = 1
    # A shear fixes the top (left) edge: in torchvision and Pillow its border, in TensorFlow the centres of the first pixels.
    edge = 1 if rules.variant == "big-vision" else 0
    direction = 1 if rules.variant == "timm" else -1  # timm gives the sign to input coordinates
    if name == "ShearX":
        result[:, 0, 1], result[:, 0, 2] = values, values * (height - edge) / 2
    elif name == "ShearY":
        result[:, 1, 0], result[:, 1, 2] = values, values * (width - edge) / 2
    elif name == "TranslateX":
        result[:, 0, 2] = direction * values
    elif name == "TranslateY":
        result[:, 1, 2] = direction * values
    else:
        cosine, sine = np.cos(np.radians(values)), np.sin(np.radians(values))
        result[:, 0, 0], result[:, 0, 1], result[:, 1, 0], result[:, 1, 1] = cosine, -sine, sine, cosine
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
