"""Draw the operations of RandAugment and TrivialAugment: which ones, how strong, with which sign.

RandAugment has three variants. `torchvision` has torchvision's 14 operations and magnitudes 0 to 30. `big-vision` has the 16
operations of the code for "How to train your ViT": magnitude 10 is full strength and larger ones extrapolate, no
operation is the identity (so magnitude 0 still changes images), and empty areas are filled with grey (128), not black.
`timm` has timm's 15 operations and magnitudes 0 to 10: an operation is applied with a probability (0.5), its magnitude may
be drawn from a normal distribution, empty areas get the mean colour of the preprocessing, and images are interpolated.

TrivialAugment applies one of torchvision's operations, with one of 31 magnitudes in wider ranges.
"""

from __future__ import annotations

import numpy as np
import torch

from vitrail.data.augment.operations import SKIPPED, Operations, Style
from vitrail.data.augment.rng import Purpose, uniforms
from vitrail.data.augment.spec import Augment, RandAugmentVariant
from vitrail.data.types import Array

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
_ENHANCE = ("Brightness", "Color", "Contrast", "Sharpness")


def draw_randaugment(
    augment: Augment, mean: tuple[float, ...], size: tuple[int, int], seed: int, epoch: int, first: int, count: int
) -> Operations:
    """Draw the operations for the images at positions first, first + 1, … of an epoch, which are cropped to `size`.

    `mean` is that of the preprocessing, one value from 0 to 1 per channel.
    """
    per_image, names = augment.randaugment_count, OPERATIONS[augment.randaugment]
    numbers = uniforms(seed, epoch, Purpose.RANDAUGMENT, first, count, per_image * 4).reshape(count, per_image, 4)
    codes = np.floor(numbers[..., 0] * len(names)).astype(np.int64)
    signs = np.where(numbers[..., 1] < 0.5, -1.0, 1.0)
    magnitudes = np.full(codes.shape, augment.randaugment_magnitude)
    if augment.operation_probability < 1 or augment.randaugment_deviation > 0:
        more = uniforms(seed, epoch, Purpose.MAGNITUDE, first, count, per_image * 2).reshape(count, per_image, 2)
        codes[more[..., 0] >= augment.operation_probability] = SKIPPED
        if augment.randaugment_deviation > 0:
            normal = torch.special.ndtri(torch.from_numpy(more[..., 1]).clamp(min=2.0**-54)).numpy()
            magnitudes = np.clip(magnitudes + augment.randaugment_deviation * normal, 0, 10)
    arguments = np.zeros(codes.shape)
    for code, name in enumerate(names):
        chosen = codes == code
        if chosen.any():
            arguments[chosen] = randaugment_arguments(augment, name, magnitudes[chosen], signs[chosen], size)
    return Operations(names, codes, arguments, randaugment_style(augment, mean), numbers[..., 2:])


def draw_trivialaugment(mean: tuple[float, ...], seed: int, epoch: int, first: int, count: int) -> Operations:
    """Draw one operation of TrivialAugment for each of the images at positions first, first + 1, … of an epoch."""
    names = OPERATIONS["torchvision"]
    numbers = uniforms(seed, epoch, Purpose.RANDAUGMENT, first, count, 3)
    codes = np.floor(numbers[:, 0] * len(names)).astype(np.int64)
    signs = np.where(numbers[:, 1] < 0.5, -1.0, 1.0)
    magnitudes = np.floor(numbers[:, 2] * 31)
    arguments = np.zeros(count)
    for code, name in enumerate(names):
        chosen = codes == code
        arguments[chosen] = trivialaugment_arguments(name, magnitudes[chosen], signs[chosen])
    return Operations(names, codes[:, None], arguments[:, None], Style("torchvision", (0,) * len(mean)))


def randaugment_style(augment: Augment, mean: tuple[float, ...]) -> Style:
    """Return whose rules a variant follows, for images with this mean."""
    if augment.randaugment == "timm":
        fill = tuple(min(255, round(255 * value)) for value in mean)
        return Style("pillow", fill, augment.interpolation)
    if augment.randaugment == "big-vision":
        return Style("tensorflow", (128,) * len(mean))
    return Style("torchvision", (0,) * len(mean))


def randaugment_arguments(augment: Augment, name: str, magnitudes: Array, signs: Array, size: tuple[int, int]) -> Array:
    """Return the arguments of an operation for images of this (height, width)."""
    if augment.randaugment == "torchvision":
        return _torchvision(name, magnitudes / 30, signs, size)
    level, timm, increasing = magnitudes / 10, augment.randaugment == "timm", augment.randaugment_increasing
    if name in ("ShearX", "ShearY"):
        return signs * 0.3 * level
    if name in ("TranslateX", "TranslateY"):
        return signs * 0.45 * size[1 if name == "TranslateX" else 0] * level if timm else -signs * 100.0 * level
    if name == "Rotate":
        return signs * 30.0 * level
    if name in _ENHANCE:
        return np.maximum(1 + signs * 0.9 * level, 0.1) if increasing else 1.8 * level + 0.1
    if name == "Posterize":
        bits = np.floor(level * 4)
        if timm:  # no bit stays at the largest magnitude (at the smallest, unless `increasing`)
            return 4 - bits if increasing else bits
        # TensorFlow clamps a shift to the bits of the type minus one, so at least one bit always stays.
        return np.clip(bits, 1, 8)
    if name == "Solarize":
        threshold = np.floor(level * 256)
        return 256 - threshold if increasing else threshold
    if name == "SolarizeAdd":
        return np.floor(level * 110)
    return np.floor(level * 40)  # Cutout; the other operations have no argument


def _torchvision(name: str, level: Array, signs: Array, size: tuple[int, int]) -> Array:
    if name in ("ShearX", "ShearY"):
        return signs * 0.3 * level
    if name in ("TranslateX", "TranslateY"):
        return -signs * np.floor(150.0 / 331.0 * size[1 if name == "TranslateX" else 0] * level)
    if name == "Rotate":
        return signs * 30.0 * level
    if name == "Posterize":
        bits: Array = np.rint(8 - 4 * level)
        return bits
    return 255.0 * (1 - level) if name == "Solarize" else 1 + signs * 0.9 * level


def trivialaugment_arguments(name: str, magnitudes: Array, signs: Array) -> Array:
    """Return the arguments of an operation in TrivialAugment's wide ranges, for magnitudes 0 to 30."""
    level = magnitudes / 30
    if name in ("ShearX", "ShearY"):
        return signs * 0.99 * level
    if name in ("TranslateX", "TranslateY"):
        return -signs * np.floor(32.0 * level)
    if name == "Rotate":
        return signs * 135.0 * level
    if name == "Posterize":
        return np.rint(8 - magnitudes / 5)
    return 255.0 * (1 - level) if name == "Solarize" else 1 + signs * 0.99 * level
