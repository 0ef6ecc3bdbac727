"""Figures of a regression, in the targets' own units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.evaluate.intervals import Interval, bootstrap

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PerTarget:
    mae: Array
    rmse: Array
    r2: Array  # NaN for a target that is the same for all images
    mean: Array  # of the truth


def per_target(predicted: Array, truth: Array, weights: Array | None = None) -> PerTarget:
    """Of each column; `weights` says how often each image counts."""
    error, truth = predicted.astype(np.float64) - truth, truth.astype(np.float64)
    unit = np.ones(len(truth)) if weights is None else weights
    total = unit.sum()
    mean = unit @ truth / total
    spread, squared = unit @ (truth - mean) ** 2, unit @ error**2
    r2 = np.full(truth.shape[1], np.nan)
    np.divide(squared, spread, out=r2, where=spread > 0)
    return PerTarget(unit @ np.abs(error) / total, np.sqrt(squared / total), 1 - r2, mean)


def figures(predicted: Array, truth: Array, *, draws: int = 1000, seed: int = 0) -> tuple[dict[str, float], dict[str, Interval]]:
    """Each averaged over the targets, with intervals."""

    def mean_of(name: str, weights: Array | None = None) -> float:
        values = getattr(per_target(predicted, truth, weights), name)
        return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")

    names = ("mae", "rmse", "r2")
    intervals = {name: bootstrap(lambda w, n=name: mean_of(n, w), len(truth), draws=draws, seed=seed) for name in names}  # type: ignore[misc]
    return {name: mean_of(name) for name in names}, intervals
