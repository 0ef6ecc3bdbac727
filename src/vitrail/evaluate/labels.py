"""Figures where an image may have any number of labels: each label is a yes or no with a score of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.evaluate.intervals import Interval, bootstrap
from vitrail.tasks.multilabel import average_precision, best_threshold

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PerLabel:
    average_precision: Array  # NaN for a label that no image has: it cannot be ranked
    precision: Array
    recall: Array
    f1: Array
    support: Array
    threshold: Array
    best_threshold: Array  # at which F1 on these very images would be best; choose thresholds on validation data with it


def per_label(scores: Array, truth: Array, thresholds: Array | None = None) -> PerLabel:
    """`scores` [images, labels] are probabilities, `truth` is 0 or 1; a label is given from its threshold (0.5) upwards."""
    truth = truth > 0.5
    labels = scores.shape[1]
    levels = np.full(labels, 0.5) if thresholds is None else np.asarray(thresholds, np.float64)
    given = scores >= levels
    hits, support, taken = (given & truth).sum(0), truth.sum(0), given.sum(0)
    ranked = [average_precision(scores[:, k], truth[:, k]) if support[k] else float("nan") for k in range(labels)]
    return PerLabel(
        average_precision=np.array(ranked),
        precision=hits / np.maximum(taken, 1),
        recall=hits / np.maximum(support, 1),
        f1=2 * hits / np.maximum(taken + support, 1),
        support=support,
        threshold=levels,
        best_threshold=np.array([best_threshold(scores[:, k], truth[:, k]) for k in range(labels)]),
    )


def figures(
    scores: Array, truth: Array, thresholds: Array | None = None, *, draws: int = 200, seed: int = 0
) -> tuple[dict[str, float], dict[str, Interval]]:
    """mAP over labels that occur, F1 over all decisions (micro) and over labels (macro), exact matches; with intervals."""
    found = per_label(scores, truth, thresholds)
    given, true = scores >= found.threshold, truth > 0.5
    occurs = found.support > 0
    exact = (given == true).all(1)
    hits, taken, support = (given & true).sum(1), given.sum(1), true.sum(1)
    values = {
        "map": float(np.nanmean(found.average_precision)) if occurs.any() else float("nan"),
        "f1_micro": float(2 * hits.sum() / max(taken.sum() + support.sum(), 1)),
        "f1_macro": float(found.f1[occurs].mean()) if occurs.any() else float("nan"),
        "exact_match": float(exact.mean()),
    }
    ranking = _Ranking(scores, true)
    statistics = {
        "map": ranking.mean_average_precision,
        "f1_micro": lambda w: float(2 * (hits * w).sum() / max(((taken + support) * w).sum(), 1)),
        "f1_macro": lambda w: _macro(given, true, w),
        "exact_match": lambda w: float((exact * w).sum() / len(w)),
    }
    return values, {name: bootstrap(one, len(scores), draws=draws, seed=seed) for name, one in statistics.items()}


class _Ranking:
    """Scores sorted once, so that average precision can be computed again for any weights of the images."""

    def __init__(self, scores: Array, truth: Array) -> None:
        self.order = np.argsort(-scores, axis=0, kind="stable")
        ranked = np.take_along_axis(scores, self.order, 0)
        self.truth = np.take_along_axis(truth, self.order, 0)
        # Images with equal scores come in together: precision is read at the last of them.
        self.lasts = [np.flatnonzero(np.diff(ranked[:, k], append=-np.inf)) for k in range(scores.shape[1])]

    def mean_average_precision(self, weights: Array) -> float:
        found = []
        for k, last in enumerate(self.lasts):
            drawn = weights[self.order[:, k]]
            hits, seen = (drawn * self.truth[:, k]).cumsum()[last], drawn.cumsum()[last]
            if hits[-1] > 0:
                precision = hits / np.maximum(seen, 1)
                found.append(float((np.diff(hits, prepend=0) * precision).sum() / hits[-1]))
        return float(np.mean(found)) if found else float("nan")


def _macro(given: Array, true: Array, weights: Array) -> float:
    hits, sizes = weights @ (given & true), weights @ given + weights @ true
    occurs = weights @ true > 0
    return float((2 * hits[occurs] / sizes[occurs]).mean()) if occurs.any() else float("nan")
