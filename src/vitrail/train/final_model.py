"""What a finished run leaves in `model/`: the last checkpoint or the best one, and the other of the two next to it."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.tasks.base import metric_text
from vitrail.train.best_checkpoint import RAW
from vitrail.train.export import export_model

if TYPE_CHECKING:
    from vitrail.train.loop import Loop
    from vitrail.train.validate import Validation


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


def write_models(loop: Loop, validation: Validation | None) -> tuple[SavedModel, dict[str, float]]:
    """Write `model/`, and with `keep_best` the other of best and last next to it; return what `model/` holds and its metrics.

    `validation` is that of the last step. All ranks take part. Afterwards the model may hold the weights of the best step.
    """
    last = SavedModel("last", loop.done, loop.done, "averaged" if loop.step.average is not None else "raw")
    best = _best(loop, last.weights)
    others = {name: loop.run.path / f"model-{name}" for name in ("best", "last")}
    if best is None or (best.step, best.weights) == (last.step, last.weights):
        _remove(loop, *others.values())
        return best or last, _write(loop, best or last, loop.run.model, validation)
    wants_best = loop.recipe.final_model != "last"
    _remove(loop, others["best" if wants_best else "last"])
    metrics_of_last = _write(loop, last, others["last"] if wants_best else loop.run.model, validation)
    if best.step != loop.done:
        if loop.snapshots.load(loop.step.tensors(), best.step) is None:
            loop.say(f"warning: the best checkpoint, of step {best.step}, is corrupted or missing; model/ holds the last one")
            _remove(loop, *others.values())
            return last, _write(loop, last, loop.run.model, validation)
        loop.step.runner.reshard()
        validation = loop.validator.evaluate(best.step)
    metrics_of_best = _write(loop, best, loop.run.model if wants_best else others["best"], validation)
    return (best, metrics_of_best) if wants_best else (last, metrics_of_last)


def _best(loop: Loop, weights: str) -> SavedModel | None:
    if not loop.selection.keeps_best:
        return None
    best = loop.selection.best
    if best is None:
        loop.say(f"warning: {loop.selection.metric} was not finite in any validation; model/ holds the last checkpoint")
        return None
    weights = "raw" if best.metric.startswith(RAW) else weights
    return SavedModel("best", best.step, loop.done, weights, best.metric, best.value)


def _write(loop: Loop, saved: SavedModel, folder: Path, validation: Validation | None) -> dict[str, float]:
    meter, metrics = (None, {}) if validation is None else validation.of_weights(raw=saved.weights == "raw")
    average = loop.step.average
    averaged: AbstractContextManager[None] = nullcontext() if average is None or saved.weights == "raw" else average.applied()
    with averaged:
        export_model(loop.run, folder, loop.recipe, loop.prepared, loop.world, metrics, meter, saved.to_dict(), saved.describe())
    return metrics


def _remove(loop: Loop, *folders: Path) -> None:
    """Remove what an earlier end of the same run left, which the run was then allowed to change."""
    for folder in folders if loop.world.main else ():
        shutil.rmtree(folder, ignore_errors=True)
