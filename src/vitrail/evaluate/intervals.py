"""How far a measured figure can be trusted, given the number of images it was measured on."""

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
    """The Wilson score interval of a share. Unlike the usual ±, it stays within 0 and 1 and holds for small numbers."""
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share, spread = hits / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z * ((share * (1 - share) / total + spread / (4 * total)) ** 0.5) / (1 + spread)
    # At the two ends the formula gives exactly 0 and 1, which rounding may miss.
    return (0.0 if hits == 0 else max(0.0, middle - half)), (1.0 if hits == total else min(1.0, middle + half))


def bootstrap(
    statistic: Callable[[Array], float], images: int, *, draws: int = 1000, seed: int = 0, level: float = LEVEL
) -> Interval:
    """A percentile interval of any figure: it is computed again on `draws` sets of images drawn with replacement.

    `statistic` gets how often each image was drawn [images], so that what is costly, such as sorting, is done once outside.
    """
    if images == 0:
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    found = [statistic(np.bincount(generator.integers(images, size=images), minlength=images)) for _ in range(draws)]
    low, high = np.nanquantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
