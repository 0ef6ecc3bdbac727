"""RandAugment's decisions: which operations, how strong, which way.

Two variants. `torchvision` has its 14 operations and magnitudes 0 to 30. `big-vision` has the 16 operations of the
code behind "How to train your ViT": magnitude 10 is the full strength and larger ones extrapolate, no operation is the
identity (so magnitude 0 still changes images), and what moves out of the picture leaves grey (128), not black.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.augment.spec import Augment, RandAugmentVariant
from vitrail.data.augment.streams import Stream, uniforms
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
LOOKED_UP = ("Brightness", "Posterize", "Solarize", "SolarizeAdd", "Invert")
_ENHANCING = ("Brightness", "Color", "Contrast", "Sharpness")


@dataclass(frozen=True)
class Operations:
    """What happens to each of n images, in order: [n, count] names by number, signed strengths, and two free numbers."""

    variant: RandAugmentVariant
    magnitude: float
    codes: Array
    signs: Array
    spots: Array


def draw_operations(augment: Augment, seed: int, epoch: int, first: int, count: int) -> Operations:
    """The operations for the images at positions first, first + 1, … of an epoch."""
    rounds, names = augment.randaugment_count, OPERATIONS[augment.randaugment]
    numbers = uniforms(seed, epoch, Stream.RANDAUGMENT, first, count, rounds * 4).reshape(count, rounds, 4)
    return Operations(
        variant=augment.randaugment,
        magnitude=augment.randaugment_magnitude,
        codes=np.floor(numbers[..., 0] * len(names)).astype(np.int64),
        signs=np.where(numbers[..., 1] < 0.5, -1.0, 1.0),
        spots=numbers[..., 2:],
    )


def strength(variant: RandAugmentVariant, name: str, magnitude: float, size: tuple[int, int]) -> float:
    """The unsigned argument of an operation on an image of this (height, width), in the operation's own unit."""
    height, width = size
    if variant == "torchvision":
        share = magnitude / 30
        return {
            **dict.fromkeys(("ShearX", "ShearY"), 0.3 * share),
            "TranslateX": float(int(150.0 / 331.0 * width * share)),
            "TranslateY": float(int(150.0 / 331.0 * height * share)),
            "Rotate": 30.0 * share,
            **dict.fromkeys(_ENHANCING, 0.9 * share),
            "Posterize": float(np.rint(8 - 4 * share)),
            "Solarize": 255.0 * (1 - share),
        }.get(name, 0.0)
    share = magnitude / 10
    return {
        **dict.fromkeys(("ShearX", "ShearY"), 0.3 * share),
        **dict.fromkeys(("TranslateX", "TranslateY"), 100.0 * share),
        "Rotate": 30.0 * share,
        **dict.fromkeys(_ENHANCING, 1.8 * share + 0.1),
        # TensorFlow limits a shift to the width of the type less one, so no bits at all still leave one.
        "Posterize": float(np.clip(int(share * 4), 1, 8)),
        "Solarize": float(int(share * 256)),
        "SolarizeAdd": float(int(share * 110)),
        "Cutout": float(int(share * 40)),
    }.get(name, 0.0)


def factor(variant: RandAugmentVariant, amount: float, sign: Array) -> Array:
    """How an enhancing operation weighs the image against its dull version: torchvision goes both ways from 1."""
    return 1 + sign * amount if variant == "torchvision" else np.full_like(sign, amount)


def matrices(variant: RandAugmentVariant, name: str, amount: float, sign: Array, size: tuple[int, int]) -> Array:
    """Where pixels come from: [n, 2, 3], from a place in the result to one in the source, (0, 0) being the middle."""
    height, width = size
    level = sign * amount
    result = np.zeros((len(sign), 2, 3))
    result[:, 0, 0] = result[:, 1, 1] = 1
    # A shear holds the top (left) edge: torchvision's its border, TensorFlow's the centres of the first pixels.
    edge = 0 if variant == "torchvision" else 1
    if name == "ShearX":
        result[:, 0, 1], result[:, 0, 2] = level, level * (height - edge) / 2
    elif name == "ShearY":
        result[:, 1, 0], result[:, 1, 2] = level, level * (width - edge) / 2
    elif name == "TranslateX":
        result[:, 0, 2] = -level
    elif name == "TranslateY":
        result[:, 1, 2] = -level
    else:
        cosine, sine = np.cos(np.radians(level)), np.sin(np.radians(level))
        result[:, 0, 0], result[:, 0, 1], result[:, 1, 0], result[:, 1, 1] = cosine, -sine, sine, cosine
    return result


def lookup_table(name: str, argument: float) -> Array:
    """What becomes of each of the 256 pixel values, for an operation that looks at nothing else."""
    values = np.arange(256)
    if name == "Brightness":
        return (values.astype(np.float32) * np.float32(argument)).clip(0, 255).astype(np.uint8)
    if name == "Posterize":
        keep = 8 - int(argument)
        return (values >> keep << keep).astype(np.uint8)
    if name == "Solarize":
        return np.where(values >= argument, 255 - values, values).astype(np.uint8)
    if name == "SolarizeAdd":
        return np.where(values < 128, np.clip(values + int(argument), 0, 255), values).astype(np.uint8)
    if name == "Invert":
        return (255 - values).astype(np.uint8)
    raise KeyError(name)
