"""Confidence intervals of metrics, given the number of images they were computed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.wilson import LEVEL, Interval, wilson

Array = npt.NDArray[Any]


def bootstrap(
    value: float, statistic: Callable[[Array], float], images: int, *, resamples: int = 1000, seed: int = 0, level: float = LEVEL
) -> Interval:
    """Compute a percentile bootstrap interval of an unbounded metric. NaN if the resamples show no spread, as with one image.

    It is extended to the value itself, which biased resamples of a few images can miss.
    """
    if images == 0 or np.isnan(value):
        return float("nan"), float("nan")
    values = _resampled(statistic, images, resamples, seed)
    known = values[~np.isnan(values)]
    if len(known) == 0 or known.min() == known.max():
        return float("nan"), float("nan")
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return min(float(low), value), max(float(high), value)


def share_interval(
    value: float,
    statistic: Callable[[Array], float],
    images: int,
    *,
    groups: Array | None = None,
    resamples: int = 1000,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """Compute the interval of a metric from 0 to 1 that is not a plain proportion, such as F1: Wilson's, with an effective size.

    The effective size is the number of images at which a proportion would have the variance that a bootstrap over images shows.
    It is at most the number of images and, for a mean over classes or labels with `groups` images each, at most what an equally
    certain proportion would need. So the interval always contains the value, and 6 correct images are not 100 % to 100 %.
    """
    if images == 0 or np.isnan(value):
        return float("nan"), float("nan")
    size = float(images)
    if groups is not None:
        sizes = groups[groups > 0]
        size = min(size, len(sizes) ** 2 / float((1 / sizes).sum()))
    values = _resampled(statistic, images, resamples, seed)
    variance = float(np.nanvar(values)) if not np.isnan(values).all() else 0.0
    if variance > 0:
        size = min(size, max(value * (1 - value) / variance, 1.0))
    return wilson(value * size, size, level)


def _resampled(statistic: Callable[[Array], float], images: int, resamples: int, seed: int) -> Array:
    """Resample the images with replacement and recompute the statistic.

    `statistic` takes sample weights [images] (how often each image was drawn), so expensive work such as sorting is done once.
    """
    generator = np.random.default_rng(seed)
    draws = (np.bincount(generator.integers(images, size=images), minlength=images) for _ in range(resamples))
    return np.array([statistic(weights) for weights in draws])
