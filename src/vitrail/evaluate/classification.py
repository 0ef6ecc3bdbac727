"""Compute classification metrics from a few numbers per image.

Not the whole row of probabilities is stored, but the predicted class and the rank of the true one: 50,000 images with 20,000
classes fit into a few megabytes, and every metric here can be computed from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from vitrail.evaluate.intervals import bootstrap, share_interval
from vitrail.tasks.ranking import ranked
from vitrail.wilson import Interval, wilson

Array = npt.NDArray[Any]
TOP_K = 5


@dataclass(frozen=True)
class Predictions:
    """A classifier's predictions for some images of a split. `vitrail.tasks.ranking` says what equal scores count as."""

    indices: Array  # int64 [n], positions in the split
    targets: Array  # int64 [n]
    predicted: Array  # int64 [n]
    confidence: Array  # float32 [n], probability of `predicted`
    ranks: Array  # int64 [n], classes ranked before the true one
    nll: Array  # float32 [n], negative log-likelihood of the label

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def correct(self) -> Array:
        return np.asarray(self.ranks == 0)

    @staticmethod
    def from_logits(logits: Tensor, targets: Tensor, indices: Tensor, *, sigmoid: bool = False) -> Predictions:
        """Rank the classes of a batch of logits [n, classes].

        With `sigmoid` (a model trained with a sigmoid loss), each class has an independent probability, and the likelihood is
        that of a yes to the true class and a no to all others: the binary cross-entropy, summed over classes. The probability of
        the true class alone would be best for a model that says yes to everything.
        """
        logits = logits.float()
        ranks, predicted = ranked(logits, targets)
        if sigmoid:
            probabilities = logits.sigmoid()
            nll = F.binary_cross_entropy_with_logits(logits, F.one_hot(targets, logits.shape[1]).float(), reduction="none").sum(1)
        else:
            probabilities, nll = logits.softmax(1), F.cross_entropy(logits, targets, reduction="none")
        parts = (predicted, probabilities.gather(1, predicted[:, None])[:, 0], ranks, nll)
        return Predictions(indices.cpu().numpy(), targets.cpu().numpy(), *(part.cpu().numpy() for part in parts))

    @staticmethod
    def concat(parts: Sequence[Predictions]) -> Predictions:
        """Concatenate predictions and sort them by their position in the split."""
        order = np.argsort(np.concatenate([part.indices for part in parts]), kind="stable")
        return Predictions(*(np.concatenate([getattr(part, field.name) for part in parts])[order] for field in fields(Predictions)))

    def subset(self, rows: Array) -> Predictions:
        return Predictions(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class PerClass:
    """Precision, recall and F1 of every class. A metric with a denominator of 0 is 0."""

    precision: Array
    recall: Array
    f1: Array
    support: Array  # images of the class
    predicted: Array  # images predicted as the class


def per_class(targets: Array, predicted: Array, classes: int, weights: Array | None = None) -> PerClass:
    """Compute the metrics of every class. `weights` are sample weights, default: 1."""
    hits = np.bincount(targets, weights=(targets == predicted) * (1 if weights is None else weights), minlength=classes)
    support = np.bincount(targets, weights=weights, minlength=classes)
    predicted_count = np.bincount(predicted, weights=weights, minlength=classes)
    return PerClass(
        precision=_ratio(hits, predicted_count),
        recall=_ratio(hits, support),
        f1=_ratio(2 * hits, support + predicted_count),
        support=support,
        predicted=predicted_count,
    )


def top_k_accuracy(predictions: Predictions, k: int) -> float:
    """Return the share of images with fewer than `k` classes ranked before the true one."""
    return float((predictions.ranks < k).mean())


def balanced_accuracy(scores: PerClass) -> float:
    """Average the recall over the classes that occur."""
    return float(scores.recall[scores.support > 0].mean())


def macro_f1(scores: PerClass) -> float:
    """Average the F1 over the classes that occur or were predicted."""
    present = (scores.support > 0) | (scores.predicted > 0)
    return float(scores.f1[present].mean())


def confusion_matrix(targets: Array, predicted: Array, classes: int) -> Array:
    """Count images by [true class, predicted class]."""
    pairs = targets.astype(np.int64) * classes + predicted
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


@dataclass(frozen=True)
class Confusion:
    """Images of class `true` predicted as `predicted`."""

    true: int
    predicted: int
    count: int
    fraction: float  # of the images of the true class
    examples: tuple[int, ...]  # rows of the predictions, highest confidence first


def worst_confusions(predictions: Predictions, classes: int, *, limit: int = 10, examples: int = 6) -> list[Confusion]:
    """Find the pairs of classes that are confused most often. Builds no matrix, so any number of classes works."""
    wrong = np.flatnonzero(~predictions.correct)
    pairs = predictions.targets[wrong].astype(np.int64) * classes + predictions.predicted[wrong]
    unique, counts = np.unique(pairs, return_counts=True)
    support = np.bincount(predictions.targets, minlength=classes)
    confusions = []
    for pair in np.lexsort((unique, -counts))[:limit]:
        true, predicted = divmod(int(unique[pair]), classes)
        rows = wrong[pairs == unique[pair]]
        most_confident = rows[np.argsort(-predictions.confidence[rows], kind="stable")][:examples]
        count = int(counts[pair])
        confusions.append(Confusion(true, predicted, count, count / int(support[true]), tuple(most_confident.tolist())))
    return confusions


@dataclass(frozen=True)
class Calibration:
    """Confidence against accuracy, in bins of equal width."""

    ece: float  # expected calibration error: the mean gap, weighted by images
    mce: float  # maximum calibration error: the largest gap of a bin that has images
    edges: Array  # [bins + 1]
    confidence: Array  # mean of each bin, NaN where it is empty
    accuracy: Array
    count: Array


def calibration(confidence: Array, correct: Array, *, bins: int = 15, weights: Array | None = None) -> Calibration:
    """Bin predictions by confidence. Bins are open on the left and closed on the right, as in Guo et al. (2017)."""
    edges = np.linspace(0, 1, bins + 1)
    bin_index = np.clip(np.ceil(confidence.astype(np.float64) * bins).astype(np.int64) - 1, 0, bins - 1)
    weights = np.ones(len(bin_index)) if weights is None else weights
    count = np.bincount(bin_index, weights=weights, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(bin_index, weights=confidence * weights, minlength=bins) / count
        accuracy = np.bincount(bin_index, weights=correct * weights, minlength=bins) / count
    gaps = np.abs(mean_confidence - accuracy)
    filled = count > 0
    ece = float((gaps[filled] * count[filled]).sum() / max(count.sum(), 1))
    return Calibration(ece, float(gaps[filled].max(initial=0.0)), edges, mean_confidence, accuracy, count)


def metrics(
    predictions: Predictions, classes: int, *, resamples: int = 1000, seed: int = 0
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Compute every scalar metric and its 95 % confidence interval.

    The calibration error has no interval: it is a mean of absolute gaps, which noise only increases, so that resampled values
    lie above it.
    """
    total, targets, predicted = len(predictions), predictions.targets, predictions.predicted
    scores = per_class(targets, predicted, classes)
    values = {"accuracy": float(predictions.correct.mean())}
    if classes > TOP_K:
        values["top5_accuracy"] = top_k_accuracy(predictions, TOP_K)
    values |= {
        "balanced_accuracy": balanced_accuracy(scores),
        "macro_f1": macro_f1(scores),
        "nll": float(predictions.nll.astype(np.float64).mean()),
        "ece": calibration(predictions.confidence, predictions.correct).ece,
    }
    proportions = [name for name in values if name in ("accuracy", "top5_accuracy")]
    intervals: dict[str, Interval] = {name: wilson(round(values[name] * total), total) for name in proportions}
    shares: dict[str, Callable[[Array], float]] = {
        "balanced_accuracy": lambda w: balanced_accuracy(per_class(targets, predicted, classes, w)),
        "macro_f1": lambda w: macro_f1(per_class(targets, predicted, classes, w)),
    }
    for name, statistic in shares.items():
        intervals[name] = share_interval(values[name], statistic, total, groups=scores.support, resamples=resamples, seed=seed)
    nll = predictions.nll.astype(np.float64)
    intervals["nll"] = bootstrap(values["nll"], lambda w: float(nll @ w / total), total, resamples=resamples, seed=seed)
    return values, intervals


def _ratio(numerator: Array, denominator: Array) -> Array:
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)
