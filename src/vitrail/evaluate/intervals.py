"""Confidence intervals of metrics, given the number of images they were computed on."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Interval = tuple[float, float]
LEVEL = 0.95


def wilson(hits: int, total: int, level: float = LEVEL) -> Interval:
    """Compute the Wilson score interval of a proportion. Unlike the normal approximation, it stays within 0 and 1."""
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p, spread = hits / total, z * z / total
    middle = (p + spread / 2) / (1 + spread)
    half = z * ((p * (1 - p) / total + spread / (4 * total)) ** 0.5) / (1 + spread)
    # For 0 and `total` hits the formula gives exactly 0 and 1, but rounding may not.
    return (0.0 if hits == 0 else max(0.0, middle - half)), (1.0 if hits == total else min(1.0, middle + half))


def bootstrap(
    statistic: Callable[[Array], float], images: int, *, resamples: int = 1000, seed: int = 0, level: float = LEVEL
) -> Interval:
    """Compute a percentile bootstrap interval: resample the images with replacement and recompute the statistic.

    `statistic` takes sample weights [images] (how often each image was drawn), so expensive work such as sorting is done once.
    """
    if images == 0:
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    values = [statistic(np.bincount(generator.integers(images, size=images), minlength=images)) for _ in range(resamples)]
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
