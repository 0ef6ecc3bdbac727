"""The best checkpoint of a run, and early stopping: both follow one validation metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vitrail.errors import VitrailError, counted, did_you_mean
from vitrail.tasks import Task
from vitrail.tasks.base import lower_is_better, metric_text
from vitrail.train.config import Recipe

RAW = "raw_"
"""Before the name of a metric: of the raw weights, where those that are saved are averaged."""


@dataclass(frozen=True)
class Best:
    """The best validation so far; of equal ones the first."""

    metric: str
    value: float
    step: int


class Selection:
    """Follows a metric from validation to validation. Its state belongs to a checkpoint, so that a resumed run decides alike."""

    def __init__(self, recipe: Recipe, task: Task) -> None:
        self.metric = recipe.keep_best or task.headline
        self.keeps_best = recipe.keep_best is not None
        self.patience, self.min_improvement = recipe.patience, recipe.min_improvement
        self.best: Best | None = None
        self._reference: float | None = None
        """The value that must be improved on; it moves only when that happens."""
        self.stale = 0
        """Validations in a row without an improvement of more than `min_improvement`."""

    @property
    def stops(self) -> bool:
        """Whether the run is to stop early."""
        return bool(self.patience) and self.stale >= self.patience

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Add a validation; return whether it is the best so far. A value that is not finite is never better."""
        if not self.keeps_best and not self.patience:
            return False
        if self.metric not in metrics:
            raise VitrailError(
                f"keep_best is {self.metric!r}, which is not a metric of this run: it has {', '.join(metrics)}."
                f"{did_you_mean(self.metric, metrics)}"
            )
        value = metrics[self.metric]
        if self._better(value, self._reference, self.min_improvement):
            self._reference, self.stale = value, 0
        else:
            self.stale += 1
        if not self._better(value, None if self.best is None else self.best.value, 0.0):
            return False
        self.best = Best(self.metric, value, step)
        return True

    def _better(self, value: float, than: float | None, margin: float) -> bool:
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        gain = than - value if lower_is_better(self.metric) else value - than
        return gain > margin

    def state(self) -> dict[str, Any]:
        best = None if self.best is None else asdict(self.best)
        return {"metric": self.metric, "best": best, "reference": self._reference, "stale": self.stale}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint; one of another metric, or of a version without this, counts as none."""
        if not state or state["metric"] != self.metric:
            state = {"best": None, "reference": None, "stale": 0}
        self.best = None if state["best"] is None else Best(**state["best"])
        self._reference, self.stale = state["reference"], state["stale"]

    def reason(self) -> str:
        """Why the run stops early."""
        margin = f" by more than {self.min_improvement:g}" if self.min_improvement else ""
        best = "" if self.best is None else f"; the best was {metric_text(self.metric, self.best.value)} at step {self.best.step}"
        return f"{self.metric} has not improved{margin} in {counted(self.stale, 'validation')}{best}"


def check_metric(recipe: Recipe, task: Task, *, has_validation: bool, has_evaluators: bool) -> None:
    """Refuse, before the first step, a metric that no validation will have."""
    if recipe.keep_best is None and not recipe.patience:
        return
    if not has_validation:
        raise VitrailError("keep_best and patience need validation images, and there are none: add --data.holdout 0.1.")
    known, chosen = metric_names(task, averaged=recipe.ema > 0), recipe.keep_best
    if chosen is None or chosen in known or has_evaluators:
        return
    hint = did_you_mean(chosen, known)
    if chosen.startswith(RAW) and not recipe.ema:
        hint = " Raw weights are evaluated separately only with averaging (--ema)."
    raise VitrailError(f"keep_best is {chosen!r}; it can be {', '.join(known)}.{hint}")


def metric_names(task: Task, *, averaged: bool) -> list[str]:
    """Return the metrics of a task by which a checkpoint can be chosen."""
    names = list(task.metric_names())
    return [*names, *(RAW + name for name in names)] if averaged else names
