"""Draw RandAugment operations: which ones, how strong, with which sign.

There are two variants. `torchvision` has torchvision's 14 operations and magnitudes 0 to 30. `big-vision` has the 16
operations of the code for "How to train your ViT": magnitude 10 is full strength and larger ones extrapolate, no
operation is the identity (so magnitude 0 still changes images), and empty areas are filled with grey (128), not black.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
}
FILL: dict[RandAugmentVariant, int] = {"none": 0, "torchvision": 0, "big-vision": 128}

GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
LOOKUP = ("Brightness", "Posterize", "Solarize", "SolarizeAdd", "Invert")
_ENHANCE = ("Brightness", "Color", "Contrast", "Sharpness")


@dataclass(frozen=True)
class Operations:
    """The operations for n images, in order. Arrays are [n, count]: index of the operation, sign, and centre of Cutout."""

    variant: RandAugmentVariant
    magnitude: float
    codes: Array
    signs: Array
    centres: Array


def draw_operations(augment: Augment, seed: int, epoch: int, first: int, count: int) -> Operations:
    """Draw the operations for the images at positions first, first + 1, … of an epoch."""
    per_image, names = augment.randaugment_count, OPERATIONS[augment.randaugment]
    numbers = uniforms(seed, epoch, Purpose.RANDAUGMENT, first, count, per_image * 4).reshape(count, per_image, 4)
    return Operations(
        variant=augment.randaugment,
        magnitude=augment.randaugment_magnitude,
        codes=np.floor(numbers[..., 0] * len(names)).astype(np.int64),
        signs=np.where(numbers[..., 1] < 0.5, -1.0, 1.0),
        centres=numbers[..., 2:],
    )


def strength(variant: RandAugmentVariant, name: str, magnitude: float, size: tuple[int, int]) -> float:
    """Return the unsigned argument of an operation for an image of this (height, width), in the operation's unit."""
    height, width = size
    if variant == "torchvision":
        level = magnitude / 30
        return {
            **dict.fromkeys(("ShearX", "ShearY"), 0.3 * level),
            "TranslateX": float(int(150.0 / 331.0 * width * level)),
            "TranslateY": float(int(150.0 / 331.0 * height * level)),
            "Rotate": 30.0 * level,
            **dict.fromkeys(_ENHANCE, 0.9 * level),
            "Posterize": float(np.rint(8 - 4 * level)),
            "Solarize": 255.0 * (1 - level),
        }.get(name, 0.0)
    level = magnitude / 10
    return {
        **dict.fromkeys(("ShearX", "ShearY"), 0.3 * level),
        **dict.fromkeys(("TranslateX", "TranslateY"), 100.0 * level),
        "Rotate": 30.0 * level,
        **dict.fromkeys(_ENHANCE, 1.8 * level + 0.1),
        # TensorFlow clamps a shift to the bits of the type minus one, so at least one bit always stays.
        "Posterize": float(np.clip(int(level * 4), 1, 8)),
        "Solarize": float(int(level * 256)),
        "SolarizeAdd": float(int(level * 110)),
        "Cutout": float(int(level * 40)),
    }.get(name, 0.0)


def factor(variant: RandAugmentVariant, amount: float, sign: Array) -> Array:
    """Return the weight of the image against its degenerate version; in torchvision 1 plus or minus the amount."""
    return 1 + sign * amount if variant == "torchvision" else np.full_like(sign, amount)


def matrices(variant: RandAugmentVariant, name: str, amount: float, sign: Array, size: tuple[int, int]) -> Array:
    """Return affine matrices [n, 2, 3], from output to input coordinates, with the origin at the centre."""
    height, width = size
    value = sign * amount
    result = np.zeros((len(sign), 2, 3))
    result[:, 0, 0] = result[:, 1, 1] = 1
    # A shear fixes the top (left) edge: in torchvision its border, in TensorFlow the centres of the first pixels.
    edge = 0 if variant == "torchvision" else 1
    if name == "ShearX":
        result[:, 0, 1], result[:, 0, 2] = value, value * (height - edge) / 2
    elif name == "ShearY":
        result[:, 1, 0], result[:, 1, 2] = value, value * (width - edge) / 2
    elif name == "TranslateX":
        result[:, 0, 2] = -value
    elif name == "TranslateY":
        result[:, 1, 2] = -value
    else:
        cosine, sine = np.cos(np.radians(value)), np.sin(np.radians(value))
        result[:, 0, 0], result[:, 0, 1], result[:, 1, 0], result[:, 1, 1] = cosine, -sine, sine, cosine
    return result


def lookup_table(name: str, argument: float) -> Array:
    """Return the new value of each of the 256 pixel values, for an operation that works pixel by pixel."""
    values = np.arange(256)
    if name == "Brightness":
        return (values.astype(np.float32) * np.float32(argument)).clip(0, 255).astype(np.uint8)
    if name == "Posterize":
        dropped = 8 - int(argument)
        return (values >> dropped << dropped).astype(np.uint8)
    if name == "Solarize":
        return np.where(values >= argument, 255 - values, values).astype(np.uint8)
    if name == "SolarizeAdd":
        return np.where(values < 128, np.clip(values + int(argument), 0, 255), values).astype(np.uint8)
    if name == "Invert":
        return (255 - values).astype(np.uint8)
    raise KeyError(name)
