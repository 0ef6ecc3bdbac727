"""Numbers to be predicted: standardised for the loss, given back in their own units."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.tasks.base import Array, Sums, Task


class Regress(Task):
    """Squared error on targets of mean 0 and deviation 1, so that metres and millimetres learn alike."""

    kind = "regress"
    headline = "mae"

    def __init__(self, targets: Array, names: tuple[str, ...]) -> None:
        """`targets` are those of the training split [n, K]."""
        targets = np.asarray(targets, np.float64)
        if not np.isfinite(targets).all():
            row = int(np.flatnonzero(~np.isfinite(targets).all(1))[0])
            raise VitrailError(
                f"The targets of training image {row} are {targets[row].tolist()}: a regression needs finite numbers. "
                "Correct or remove that row."
            )
        deviation = targets.std(0)
        constant = (targets == targets[:1]).all(0) | (deviation == 0)  # the deviation of equal numbers is seldom exactly 0
        if constant.any():
            name = names[int(np.flatnonzero(constant)[0])]
            raise VitrailError(f"The target {name!r} is the same for every training image: there is nothing to learn. Remove it.")
        self.outputs, self.names = targets.shape[1], names
        self.mean = torch.as_tensor(targets.mean(0), dtype=torch.float32)
        self.std = torch.as_tensor(deviation, dtype=torch.float32)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.float() - (targets.float() - self.mean) / self.std).square().mean(1)

    def values(self, outputs: Tensor) -> Tensor:
        """Return what the model predicts, in the targets' own units."""
        return outputs.float() * self.std + self.mean

    def to(self, device: Any) -> Task:
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    def meter(self) -> NumberMeter:
        return NumberMeter(self)

    def metric_names(self) -> tuple[str, ...]:
        return ("mae", "r2", "loss")

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "targets": list(self.names), "mean": self.mean.tolist(), "std": self.std.tolist()}


class NumberMeter(Sums):
    """Mean absolute error in the targets' units, and R², averaged over targets."""

    def __init__(self, task: Regress) -> None:
        super().__init__()
        self.task = task

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        truth = targets.double()
        error = self.task.values(outputs).double() - truth
        self.gather(
            count=len(targets),
            loss=float(self.task.loss(outputs, targets).double().sum()),
            absolute=error.abs().sum(0).cpu().numpy(),
            squared=error.square().sum(0).cpu().numpy(),
            first=truth.sum(0).cpu().numpy(),
            second=truth.square().sum(0).cpu().numpy(),
        )

    def metrics(self) -> dict[str, float]:
        sums = self.sums
        count = int(sums["count"])
        spread = sums["second"] - sums["first"] ** 2 / count
        explained = 1 - sums["squared"] / np.maximum(spread, 1e-12)
        return {
            "loss": float(sums["loss"]) / count,
            "mae": float((sums["absolute"] / count).mean()),
            "r2": float(explained.mean()),
            "images": float(count),
        }
