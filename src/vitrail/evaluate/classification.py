"""Figures of a classifier, from what it answered for each image.

Only the best few answers of an image are kept, not its whole row of probabilities: fifty thousand images and twenty
thousand classes fit into a few megabytes, and every figure here follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.evaluate.intervals import Interval, bootstrap, wilson

Array = npt.NDArray[Any]
TOP = 5


@dataclass(frozen=True)
class Answers:
    """A classifier's answers to some images of a split."""

    indices: Array  # int64 [n], positions in the split
    targets: Array  # int64 [n]
    top: Array  # int32 [n, k], the best classes, best first
    probability: Array  # float32 [n, k], of these
    nll: Array  # float32 [n], −log of the target's probability

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def predicted(self) -> Array:
        return np.asarray(self.top[:, 0])

    @property
    def correct(self) -> Array:
        return np.asarray(self.predicted == self.targets)

    @staticmethod
    def of(logits: Tensor, targets: Tensor, indices: Tensor, *, sigmoid: bool = False) -> Answers:
        """From the outputs [n, classes] of a batch. With `sigmoid` each class's probability is its own, as it was trained."""
        logits = logits.float()
        logs = torch.nn.functional.logsigmoid(logits) if sigmoid else logits.log_softmax(1)
        top = logs.topk(min(TOP, logits.shape[1]), dim=1)
        nll = -logs.gather(1, targets[:, None])[:, 0]
        parts = (top.indices.int(), top.values.exp(), nll)
        return Answers(indices.cpu().numpy(), targets.cpu().numpy(), *(part.cpu().numpy() for part in parts))

    @staticmethod
    def joined(parts: Sequence[Answers]) -> Answers:
        """All of them, in the order of the split."""
        order = np.argsort(np.concatenate([part.indices for part in parts]), kind="stable")
        fields = ("indices", "targets", "top", "probability", "nll")
        return Answers(*(np.concatenate([getattr(part, name) for part in parts])[order] for name in fields))

    def subset(self, rows: Array) -> Answers:
        return Answers(self.indices[rows], self.targets[rows], self.top[rows], self.probability[rows], self.nll[rows])


@dataclass(frozen=True)
class PerClass:
    """Precision, recall and F1 of every class. A figure whose denominator is 0 is 0."""

    precision: Array
    recall: Array
    f1: Array
    support: Array  # images of the class
    predicted: Array  # images taken for it


def per_class(targets: Array, predicted: Array, classes: int, weights: Array | None = None) -> PerClass:
    """`weights` says how often each image counts, 1 unless given."""
    hits = np.bincount(targets, weights=(targets == predicted) * (1 if weights is None else weights), minlength=classes)
    support = np.bincount(targets, weights=weights, minlength=classes)
    taken = np.bincount(predicted, weights=weights, minlength=classes)
    return PerClass(
        precision=_ratio(hits, taken),
        recall=_ratio(hits, support),
        f1=_ratio(2 * hits, support + taken),
        support=support,
        predicted=taken,
    )


def top_k_accuracy(answers: Answers, k: int) -> float:
    return float((answers.top[:, :k] == answers.targets[:, None]).any(1).mean())


def balanced_accuracy(found: PerClass) -> float:
    """The mean recall over the classes that occur."""
    return float(found.recall[found.support > 0].mean())


def macro_f1(found: PerClass) -> float:
    """The mean F1 over the classes that occur or were predicted."""
    there = (found.support > 0) | (found.predicted > 0)
    return float(found.f1[there].mean())


def confusion_matrix(targets: Array, predicted: Array, classes: int) -> Array:
    """Counts [true class, predicted class]."""
    pairs = targets.astype(np.int64) * classes + predicted
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


@dataclass(frozen=True)
class Confusion:
    """Images of class `true` taken for `predicted`, the surest mistakes first."""

    true: int
    predicted: int
    count: int
    share: float  # of the images of the true class
    examples: tuple[int, ...]  # rows of the answers


def worst_confusions(answers: Answers, classes: int, *, most: int = 10, examples: int = 6) -> list[Confusion]:
    """The pairs of classes that are mistaken most often. Needs no matrix, so any number of classes will do."""
    wrong = np.flatnonzero(~answers.correct)
    pairs = answers.targets[wrong].astype(np.int64) * classes + answers.predicted[wrong]
    unique, counts = np.unique(pairs, return_counts=True)
    support = np.bincount(answers.targets, minlength=classes)
    found = []
    for place in np.lexsort((unique, -counts))[:most]:
        true, predicted = divmod(int(unique[place]), classes)
        rows = wrong[pairs == unique[place]]
        surest = rows[np.argsort(-answers.probability[rows, 0], kind="stable")][:examples]
        count = int(counts[place])
        found.append(Confusion(true, predicted, count, count / int(support[true]), tuple(surest.tolist())))
    return found


@dataclass(frozen=True)
class Calibration:
    """Whether a confidence of 80 % is right in 80 % of cases, in bins of equal width."""

    error: float  # expected calibration error: the mean gap, weighted by images
    largest: float  # the largest gap of a bin that has images
    edges: Array  # [bins + 1]
    confidence: Array  # mean of each bin, NaN where it is empty
    accuracy: Array
    count: Array


def calibration(confidence: Array, correct: Array, *, bins: int = 15, weights: Array | None = None) -> Calibration:
    """Bins are open on the left and closed on the right, as in Guo et al. (2017)."""
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.ceil(confidence.astype(np.float64) * bins).astype(np.int64) - 1, 0, bins - 1)
    unit = np.ones(len(place)) if weights is None else weights
    count = np.bincount(place, weights=unit, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(place, weights=confidence * unit, minlength=bins) / count
        accuracy = np.bincount(place, weights=correct * unit, minlength=bins) / count
    gaps = np.abs(mean_confidence - accuracy)
    filled = count > 0
    error = float((gaps[filled] * count[filled]).sum() / max(count.sum(), 1))
    return Calibration(error, float(gaps[filled].max(initial=0.0)), edges, mean_confidence, accuracy, count)


def figures(answers: Answers, classes: int, *, draws: int = 1000, seed: int = 0) -> tuple[dict[str, float], dict[str, Interval]]:
    """Every scalar figure, and a 95 % interval for those that have one."""
    total, targets, predicted = len(answers), answers.targets, answers.predicted
    counts = per_class(targets, predicted, classes)
    top_k = min(TOP, answers.top.shape[1])
    found = {"accuracy": float(answers.correct.mean())}
    if classes > TOP:
        found["top5_accuracy"] = top_k_accuracy(answers, top_k)
    found |= {
        "balanced_accuracy": balanced_accuracy(counts),
        "macro_f1": macro_f1(counts),
        "nll": float(answers.nll.astype(np.float64).mean()),
        "ece": calibration(answers.probability[:, 0], answers.correct).error,
    }
    shares = [name for name in found if name in ("accuracy", "top5_accuracy")]
    intervals: dict[str, Interval] = {name: wilson(round(found[name] * total), total) for name in shares}
    drawn: dict[str, Callable[[Array], float]] = {
        "balanced_accuracy": lambda w: balanced_accuracy(per_class(targets, predicted, classes, w)),
        "macro_f1": lambda w: macro_f1(per_class(targets, predicted, classes, w)),
        "nll": lambda w: float((answers.nll * w).sum() / total),
        "ece": lambda w: calibration(answers.probability[:, 0], answers.correct, weights=w).error,
    }
    for name, statistic in drawn.items():
        intervals[name] = bootstrap(statistic, total, draws=draws, seed=seed)
    return found, intervals


def _ratio(numerator: Array, denominator: Array) -> Array:
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)
