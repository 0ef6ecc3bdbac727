"""Compute multi-label metrics: an image has any number of labels, each with a score of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.evaluate.intervals import share_interval
from vitrail.tasks.multilabel import average_precision, best_threshold
from vitrail.wilson import Interval, wilson

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PerLabel:
    average_precision: Array  # NaN for a label that no image has
    precision: Array
    recall: Array
    f1: Array
    support: Array
    threshold: Array
    best_threshold: Array  # highest F1 on these same images; use it to choose thresholds on validation data


def per_label(scores: Array, truth: Array, thresholds: Array | None = None) -> PerLabel:
    """Compute the metrics of every label.

    `scores` [images, labels] are probabilities and `truth` is 0 or 1. A label is predicted where its score reaches its
    threshold, default: 0.5.
    """
    truth = truth > 0.5
    labels = scores.shape[1]
    thresholds = np.full(labels, 0.5) if thresholds is None else np.asarray(thresholds, np.float64)
    predicted = scores >= thresholds
    hits, support, predicted_count = (predicted & truth).sum(0), truth.sum(0), predicted.sum(0)
    precisions = [average_precision(scores[:, k], truth[:, k]) if support[k] else float("nan") for k in range(labels)]
    return PerLabel(
        average_precision=np.array(precisions),
        precision=hits / np.maximum(predicted_count, 1),
        recall=hits / np.maximum(support, 1),
        f1=2 * hits / np.maximum(predicted_count + support, 1),
        support=support,
        threshold=thresholds,
        best_threshold=np.array([best_threshold(scores[:, k], truth[:, k]) for k in range(labels)]),
    )


def metrics(
    scores: Array, truth: Array, thresholds: Array | None = None, *, resamples: int = 200, seed: int = 0
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Compute mAP and macro F1 over the labels that occur, micro F1 and exact match, with 95 % confidence intervals."""
    labels = per_label(scores, truth, thresholds)
    predicted, true = scores >= labels.threshold, truth > 0.5
    present = labels.support > 0
    exact = (predicted == true).all(1)
    hits, predicted_count, support = (predicted & true).sum(1), predicted.sum(1), true.sum(1)
    values = {
        "map": float(np.nanmean(labels.average_precision)) if present.any() else float("nan"),
        "f1_micro": float(2 * hits.sum() / max(predicted_count.sum() + support.sum(), 1)),
        "f1_macro": float(labels.f1[present].mean()) if present.any() else float("nan"),
        "exact_match": float(exact.mean()),
    }
    ranking = _Ranking(scores, true)
    interval = partial(share_interval, images=len(scores), resamples=resamples, seed=seed)

    def micro_f1(weights: Array) -> float:
        return float(2 * (hits * weights).sum() / max(((predicted_count + support) * weights).sum(), 1))

    intervals = {
        "map": interval(values["map"], ranking.mean_average_precision, groups=labels.support),
        "f1_micro": interval(values["f1_micro"], micro_f1),
        "f1_macro": interval(values["f1_macro"], lambda w: _macro_f1(predicted, true, w), groups=labels.support),
        "exact_match": wilson(int(exact.sum()), len(exact)),
    }
    return values, intervals


class _Ranking:
    """Scores sorted once, so that average precision can be recomputed for any sample weights."""

    def __init__(self, scores: Array, truth: Array) -> None:
        self.order = np.argsort(-scores, axis=0, kind="stable")
        ranked = np.take_along_axis(scores, self.order, 0)
        self.truth = np.take_along_axis(truth, self.order, 0)
        # Tied scores share one threshold: precision is read at the last image of each tie.
        self.tie_ends = [np.flatnonzero(np.diff(ranked[:, k], append=-np.inf)) for k in range(scores.shape[1])]

    def mean_average_precision(self, weights: Array) -> float:
        precisions = []
        for k, ends in enumerate(self.tie_ends):
            sorted_weights = weights[self.order[:, k]]
            hits, total = (sorted_weights * self.truth[:, k]).cumsum()[ends], sorted_weights.cumsum()[ends]
            if hits[-1] > 0:
                precision = hits / np.maximum(total, 1)
                precisions.append(float((np.diff(hits, prepend=0) * precision).sum() / hits[-1]))
        return float(np.mean(precisions)) if precisions else float("nan")


def _macro_f1(predicted: Array, true: Array, weights: Array) -> float:
    hits, sizes = weights @ (predicted & true), weights @ predicted + weights @ true
    present = weights @ true > 0
    return float((2 * hits[present] / sizes[present]).mean()) if present.any() else float("nan")
