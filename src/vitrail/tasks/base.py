"""What the training loop asks of a task."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]


class Meter(ABC):
    """Sums over a split from which its metrics follow. Meters of several ranks add up, so no image counts twice."""

    @abstractmethod
    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add a batch of outputs of `Task.predict`."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the sums, to be sent to another process."""

    @abstractmethod
    def add(self, state: dict[str, Any]) -> None:
        """Add the state of another meter."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return the metrics over everything added."""


def lower_is_better(metric: str) -> bool:
    """Tell the direction of a metric by its name, also of an evaluator's own: losses and errors go down, the rest up."""
    metric = metric.lower()
    return re.split("[^a-z0-9]", metric)[-1] in _ERRORS or metric.endswith(("loss", "error"))


_ERRORS = ("mae", "mse", "rmse", "nll", "ece", "brier", "perplexity", "fid")


PERCENTAGES = ("accuracy", "balanced_accuracy", "top5_accuracy", "map", "f1", "patch_accuracy")
"""Metrics that are shown in percent."""


def metric_text(metric: str, value: float) -> str:
    """Format a metric as it is shown everywhere: `94.15%`, or a number of four digits."""
    name = metric.removeprefix("raw_")
    return f"{value:.2%}" if name in PERCENTAGES or name.endswith("shot") else f"{value:.4g}"


class Sums(Meter):
    """A meter whose state is nothing but sums."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}

    def gather(self, **values: float | int | Array) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else np.asarray(value)

    def state(self) -> dict[str, Any]:
        return self.sums

    def add(self, state: dict[str, Any]) -> None:
        self.gather(**state)


class Task(ABC):
    """A loss over the model's outputs, and the meter that judges them.

    Losses come image by image and are summed, never averaged: the loop divides by the size of the whole step, so that the
    division into micro-batches and ranks cannot change the gradient.
    """

    kind: str
    outputs: int
    """Width of the head."""
    headline: str
    """The metric by which a run is judged, among those of the meter."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every image [n], in float32."""

    @abstractmethod
    def meter(self) -> Meter: ...

    def objective(self, run: Callable[..., Any], images: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every image, from the images. `run(images)` is the model, whatever it is wrapped in."""
        return self.loss(run(images), targets)

    def predict(self, run: Callable[..., Any], images: Tensor, indices: Tensor) -> Any:
        """Return what the meter needs of validation images; `indices` are their positions in the split."""
        return run(images)

    def metric_names(self) -> tuple[str, ...]:
        """Return the metrics of the meter by which one checkpoint is better than another, the headline first."""
        return (self.headline, "loss")

    def train_metrics(self, loss: float) -> dict[str, float]:
        """Return further metrics to log with a mean training loss."""
        return {}

    def to(self, device: Any) -> Task:
        """Move what the loss needs to a device."""
        return self

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint must know to read the outputs."""
        return {"kind": self.kind}
