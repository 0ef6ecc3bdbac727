"""`SavedModel`: which weights of a run its `model/` holds."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, get_type_hints

from vitrail.tasks.base import metric_text
from vitrail.train.best_checkpoint import RAW


@dataclass(frozen=True)
class SavedModel:
    """Which weights of a run a checkpoint folder holds."""

    checkpoint: str
    """best or last"""
    step: int
    steps_taken: int
    """By the run, in all."""
    weights: str
    """averaged or raw"""
    metric: str | None = None
    """Of the best: the metric by which it was chosen, and its value."""
    value: float | None = None

    def describe(self) -> str:
        kind = "averaged weights" if self.weights == "averaged" else "weights"
        if self.checkpoint == "last":
            return f"{kind} of the last step, {self.step}"
        if str(self.metric).startswith(RAW):
            kind = "raw weights"
        metric = str(self.metric).removeprefix(RAW).replace("_", " ")
        value = metric_text(str(self.metric), self.value or 0.0)
        return f"{kind} with the best {metric}, {value}, of step {self.step} of {self.steps_taken}"

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Any) -> SavedModel:
        """Return what `to_dict` described. A `ValueError` says what is wrong with it."""
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
        try:
            saved = cls(**values)
        except TypeError as error:
            raise ValueError("it has other fields") from error
        for name, kind in get_type_hints(cls).items():
            value = getattr(saved, name)
            allowed = isinstance(value, int | float | None if kind == float | None else kind) and not isinstance(value, bool)
            if not allowed or (isinstance(value, int | float) and not abs(value) <= sys.float_info.max):
                raise ValueError(f"{name} is {str(value)[:40]!r}")
        return saved
