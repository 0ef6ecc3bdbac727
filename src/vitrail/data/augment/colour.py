"""Draw 3-Augment (DeiT III) and colour jitter. Both follow Pillow's arithmetic, as in the libraries they come from."""

from __future__ import annotations

import numpy as np

from vitrail.data.augment.operations import SKIPPED, Operations, Style
from vitrail.data.augment.rng import Purpose, uniforms
from vitrail.data.augment.spec import Augment

THREE_AUGMENT = ("Grayscale", "Solarize", "GaussianBlur")
_BLUR = (0.1, 2.0)
JITTER = ("Brightness", "Contrast", "Color", "Hue")


def draw_three_augment(mean: tuple[float, ...], seed: int, epoch: int, first: int, count: int) -> Operations:
    """Draw one of grey, solarised and blurred for the images at positions first, first + 1, … of an epoch."""
    numbers = uniforms(seed, epoch, Purpose.THREE_AUGMENT, first, count, 2)
    codes = np.floor(numbers[:, 0] * len(THREE_AUGMENT)).astype(np.int64)
    radius = _BLUR[0] + (_BLUR[1] - _BLUR[0]) * numbers[:, 1]
    arguments = np.where(codes == THREE_AUGMENT.index("GaussianBlur"), radius, 128.0)
    return Operations(THREE_AUGMENT, codes[:, None], arguments[:, None], Style("pillow", (0,) * len(mean)))


def draw_jitter(augment: Augment, mean: tuple[float, ...], seed: int, epoch: int, first: int, count: int) -> Operations:
    """Draw factors for brightness, contrast and saturation, a shift of the hue, and the order of the four, per image."""
    numbers = uniforms(seed, epoch, Purpose.COLOUR_JITTER, first, count, 8)
    order = np.argsort(numbers[:, 4:], axis=1, kind="stable")
    strengths = np.array([augment.brightness, augment.contrast, augment.saturation, augment.hue])
    centre = np.array([1.0, 1.0, 1.0, 0.0])
    low, high = centre - strengths, centre + strengths
    low[:3] = np.maximum(low[:3], 0)
    arguments = np.take_along_axis(low + numbers[:, :4] * (high - low), order, axis=1)
    codes = np.where(strengths[order] > 0, order, SKIPPED)
    return Operations(JITTER, codes, arguments, Style("pillow", (0,) * len(mean)))
