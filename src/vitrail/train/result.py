"""`Result`: how a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.train.run import RunFolder, number_in
from vitrail.train.saved_model import SavedModel


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    out: Path
    steps: int
    headline: str
    metrics: dict[str, float]
    seconds: float = 0.0
    ended_by: int | None = None
    """The signal that interrupted it, or None when it is finished."""
    before: bool = False
    """Whether it had finished before."""
    model: SavedModel | None = None
    """Which checkpoint `model/` holds; `metrics` are its."""
    stopped_early: bool = False

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "out": str(self.out),
            "steps": self.steps,
            "seconds": self.seconds,
            "finished": self.ended_by is None,
            "stopped_early": self.stopped_early,
            "model": self.model.to_dict() if self.model is not None else None,
            "headline": self.headline,
            "metrics": self.metrics,
        }


def finished(run: RunFolder, end: dict[str, Any]) -> Result:
    """Return the result of a finished run, from the last record of its metrics.jsonl."""
    others = ("kind", "step", "headline", "seconds", "stopped_early", "model")
    return Result(
        run.path,
        end["step"],
        end["headline"],
        {name: number_in(end, name) for name, value in end.items() if name not in others and isinstance(value, int | float)},
        end["seconds"],
        before=True,
        model=SavedModel.from_dict(end["model"]) if "model" in end else None,
        stopped_early=end.get("stopped_early", False),
    )
