"""What a finished run leaves in `model/`: the last checkpoint or the best one, and the other of the two next to it."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.train.best_checkpoint import RAW
from vitrail.train.export import export_model
from vitrail.train.saved_model import SavedModel

if TYPE_CHECKING:
    from vitrail.train.loop import Loop
    from vitrail.train.validate import Validation


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
