"""Any number of labels per image: a yes or no for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from vitrail.tasks.base import Array, Meter, Task


class MultiLabel(Task):
    """Binary cross-entropy, summed over labels so that its gradient has the scale of a softmax's."""

    kind = "multilabel"
    headline = "map"

    def __init__(self, labels: int) -> None:
        self.outputs = labels

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.float(), targets.float(), reduction="none").sum(1)

    def metric_names(self) -> tuple[str, ...]:
        return ("map", "f1", "loss")

    def meter(self) -> LabelMeter:
        return LabelMeter(self)


class LabelMeter(Meter):
    """Mean average precision, F1, and for each label the threshold at which its F1 is best.

    These need every score, so scores are kept: 4 bytes per image and label.
    """

    def __init__(self, task: MultiLabel) -> None:
        self.task = task
        self.scores: list[Array] = []
        self.truth: list[Array] = []
        self.total = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += float(self.task.loss(outputs, targets).double().sum())
        self.scores.append(outputs.float().sigmoid().cpu().numpy())
        self.truth.append(targets.cpu().numpy() > 0.5)

    def state(self) -> dict[str, Any]:
        return {"scores": self.scores, "truth": self.truth, "total": self.total}

    def add(self, state: dict[str, Any]) -> None:
        self.scores += state["scores"]
        self.truth += state["truth"]
        self.total += state["total"]

    def metrics(self) -> dict[str, float]:
        scores, truth = np.concatenate(self.scores), np.concatenate(self.truth)
        precisions = [average_precision(scores[:, k], truth[:, k]) for k in range(scores.shape[1]) if truth[:, k].any()]
        chosen = scores >= 0.5
        hits = (chosen & truth).sum()
        return {
            "loss": self.total / len(scores),
            "map": float(np.mean(precisions)) if precisions else 0.0,
            "f1": float(2 * hits / max(chosen.sum() + truth.sum(), 1)),
            "images": float(len(scores)),
        }

    def thresholds(self) -> list[float]:
        """For each label the score from which on to say yes; 0.5 where a label never occurs."""
        scores, truth = np.concatenate(self.scores), np.concatenate(self.truth)
        return [best_threshold(scores[:, k], truth[:, k]) for k in range(scores.shape[1])]


def average_precision(scores: Array, truth: Array) -> float:
    """Mean of the precision at every true image, from the highest score down; equal scores count together."""
    precision, recall, _ = _curve(scores, truth)
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def best_threshold(scores: Array, truth: Array) -> float:
    if not truth.any():
        return 0.5
    precision, recall, levels = _curve(scores, truth)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    return float(levels[int(f1.argmax())])


def _curve(scores: Array, truth: Array) -> tuple[Array, Array, Array]:
    """Precision and recall when everything from each level of score upwards is a yes."""
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.diff(scores[order], append=-np.inf))  # the last image of each level
    hits = truth[order].cumsum()[last]
    return hits / (last + 1), hits / max(truth.sum(), 1), scores[order][last]
