"""One label per image, with softmax or, as the paper's largest models, with sigmoid."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.tasks.base import Array, Sums, Task
from vitrail.tasks.ranking import ranked


class Classify(Task):
    """Cross-entropy over classes.

    `sigmoid` asks every class by itself and sums over them, as the paper's ImageNet-21k and JFT training did. Class weights
    multiply an image's loss by the weight of its class; they do not rescale the batch.
    """

    kind = "classify"
    headline = "accuracy"

    def __init__(self, classes: int, *, loss: Literal["softmax", "sigmoid"] = "softmax", weights: Array | None = None) -> None:
        self.outputs = classes
        self.activation = loss
        self.weights = None if weights is None else torch.as_tensor(np.asarray(weights), dtype=torch.float32)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.float()
        if self.activation == "softmax":
            losses = F.cross_entropy(logits, targets, reduction="none")
        else:
            probabilities = targets if targets.is_floating_point() else F.one_hot(targets, self.outputs)
            losses = F.binary_cross_entropy_with_logits(logits, probabilities.float(), reduction="none").sum(1)
        if self.weights is None:
            return losses
        # A mixed label has the mean weight of its classes.
        return losses * (targets @ self.weights if targets.is_floating_point() else self.weights[targets])

    def to(self, device: Any) -> Task:
        self.weights = None if self.weights is None else self.weights.to(device)
        return self

    def meter(self) -> ClassMeter:
        return ClassMeter(self)

    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy", "balanced_accuracy", *(("top5_accuracy",) if self.outputs > 5 else ()), "loss")

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "activation": self.activation}


class ClassMeter(Sums):
    """Accuracy plain and balanced over classes, top 5 where there are more, and the mean loss."""

    def __init__(self, task: Classify) -> None:
        super().__init__()
        self.task = task

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        logits = outputs.float()
        losses = self.task.loss(logits, targets)
        ranks, predicted = ranked(logits, targets)
        right, classes = ranks == 0, self.task.outputs
        self.gather(
            count=len(targets),
            loss=float(losses.double().sum()),
            right=torch.bincount(targets[right], minlength=classes).cpu().numpy(),
            seen=torch.bincount(targets, minlength=classes).cpu().numpy(),
            predicted=torch.bincount(predicted, minlength=classes).cpu().numpy(),
            top5=int((ranks < 5).sum()),
        )

    def metrics(self) -> dict[str, float]:
        sums = self.sums
        count, seen = int(sums["count"]), sums["seen"]
        metrics = {
            "loss": float(sums["loss"]) / count,
            "accuracy": float(sums["right"].sum()) / count,
            "balanced_accuracy": float((sums["right"][seen > 0] / seen[seen > 0]).mean()),
            "predicted_classes": float((sums["predicted"] > 0).sum()),
            "images": float(count),
        }
        if self.task.outputs > 5:
            metrics["top5_accuracy"] = float(sums["top5"]) / count
        return metrics
