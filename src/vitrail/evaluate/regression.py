"""Compute regression metrics, in the units of the targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.evaluate.intervals import bootstrap
from vitrail.wilson import Interval

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PerTarget:
    mae: Array
    rmse: Array
    r2: Array  # NaN for a target that is constant over the images
    mean: Array  # of the true values


def per_target(predicted: Array, truth: Array, weights: Array | None = None) -> PerTarget:
    """Compute the metrics of every target (column). `weights` are sample weights, default: 1."""
    error, truth = predicted.astype(np.float64) - truth, truth.astype(np.float64)
    weights = np.ones(len(truth)) if weights is None else weights
    total = weights.sum()
    mean = weights @ truth / total
    variation, squared_error = weights @ (truth - mean) ** 2, weights @ error**2
    r2 = np.full(truth.shape[1], np.nan)
    np.divide(squared_error, variation, out=r2, where=variation > 0)
    return PerTarget(weights @ np.abs(error) / total, np.sqrt(squared_error / total), 1 - r2, mean)


def metrics(
    predicted: Array, truth: Array, *, resamples: int = 1000, seed: int = 0
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Average the metrics over the targets, with 95 % confidence intervals."""

    def mean_of(name: str, weights: Array | None = None) -> float:
        values = getattr(per_target(predicted, truth, weights), name)
        return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")

    values = {name: mean_of(name) for name in ("mae", "rmse", "r2")}
    intervals = {
        name: bootstrap(value, lambda w, n=name: mean_of(n, w), len(truth), resamples=resamples, seed=seed)  # type: ignore[misc]
        for name, value in values.items()
    }
    return values, intervals
