"""The page that a finished run ends with: an evaluation on its validation images, or what a masked run predicts.

`vitrail train`, `vitrail finetune` and `vitrail.finetune` write it after training, on the first rank alone. What goes wrong then is
a warning: the run is finished.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import re
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import numpy as np

from vitrail.api.bundle import Bundle, load
from vitrail.data.trained_on import overlap
from vitrail.data.types import Split
from vitrail.drawing.page import PageSection, Plot
from vitrail.drawing.style import rendered
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.evaluator import EvalResult, evaluate
from vitrail.evaluate.report import PLOT_DPI, check_output_folder, write_report
from vitrail.train.config import SELF_SUPERVISED, Recipe
from vitrail.train.curves import curves
from vitrail.train.parallel import World, choose_device
from vitrail.train.prepare import chosen_splits, opened_source
from vitrail.train.result import Result
from vitrail.train.run import RunFolder

log = logging.getLogger("vitrail.train")

MAX_IMAGES = 10_000
"""Validation images that are evaluated for the page, at most: evenly spaced ones of a larger set."""
FOLDER = "evaluation"
"""Of the run folder: report.html, or index.html with reconstructions."""
_RECONSTRUCTED = 8
_WRITTEN = re.compile(
    r"(report|index)\.html|(metrics|inspection)\.json|per-\w+\.csv|predictions\.csv|confusion\.(csv|png)|"
    r"(reliability|scatter-\d+)\.png|reconstruction\.\w+"
)
"""Files of an earlier page, which a new one replaces."""
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Given a number of images, shows them as they are done."""


def run_report(folder: str | os.PathLike[str]) -> Path | None:
    """Return the page of the run in this folder, if it has one that is not older than its end."""
    run = RunFolder(folder)
    try:
        end = (run.path / "metrics.jsonl").stat().st_mtime_ns
        pages = (run.path / FOLDER / name for name in ("report.html", "index.html"))
        return next((page for page in pages if page.is_file() and page.stat().st_mtime_ns >= end), None)
    except OSError:
        return None


def write_run_report(result: Result, progress: Progress) -> Path | None:
    """Write the page of a finished run, unless it is there already; return its path, or None if there is none.

    Other ranks than the first do nothing, so no rank waits for another.
    """
    if result.ended_by is not None or os.environ.get("RANK", "0") != "0":
        return None
    page = run_report(result.out)
    if page is not None:
        return page
    gc.collect()  # the loop and its memory on the GPU
    try:
        return _write(result, progress)
    except KeyboardInterrupt:
        log.warning("The run is finished, but its evaluation page is not. Run the same command again to write it.")
        raise
    except Exception as error:  # whatever it is, it must not look as if the run had failed
        kind = "" if isinstance(error, VitrailError | OSError) else f"{type(error).__name__}: "
        log.warning("The run is finished, but its evaluation page could not be written: %s%s", kind, error)
        return None


def _write(result: Result, progress: Progress) -> Path | None:
    recipe = RunFolder(result.out).saved_recipe()
    if recipe is None or not result.metrics:  # there were no validation images
        return None
    folder = result.out / FOLDER
    check_only_a_page(folder)
    bundle = load(result.out, device=choose_device(recipe.device))
    if recipe.task.kind in SELF_SUPERVISED:
        bundle.inspect(what="reconstruction", out=folder, show=_RECONSTRUCTED, overwrite=True)
        return folder / "index.html"
    return _evaluate(bundle, result, recipe, progress)


def check_only_a_page(folder: Path) -> None:
    """Refuse to replace a folder in which there are files of the user."""
    others = sorted(file.name for file in folder.iterdir() if not _WRITTEN.fullmatch(file.name)) if folder.is_dir() else []
    if others:
        raise VitrailError(
            f"{folder} would be replaced, but has other files ({', '.join(others[:3])}). Move them, and run the same command again."
        )


def _evaluate(bundle: Bundle, result: Result, recipe: Recipe, progress: Progress) -> Path | None:
    folder = result.out / FOLDER
    check_output_folder(folder, overwrite=True)
    source = opened_source(recipe)
    validation = chosen_splits(recipe, source)[1]
    if validation is None:
        return None
    split = _evenly_spaced(validation)
    with progress(len(split)) as advance:
        context = EvalContext(
            world=World(next(bundle.model.parameters()).device),
            workers=recipe.data.workers,
            bad_images=recipe.data.bad_images,
            progress=advance,
        )
        found = evaluate(bundle, split, context=context, trained_on=overlap(bundle.trained_on, source, split))
    about = {
        "checkpoint": str(result.out),
        "model": bundle.model.config.name,
        "data": recipe.data.source,
        "training": f"{recipe.name}, {counted(result.steps, 'step')}, {timedelta(seconds=round(result.seconds))}",
        "assumptions": bundle.report.assumptions,
    }
    write_report(folder, [_with_note(found, validation, result.out)], split, about, _training(result))
    return folder / "report.html"


def _evenly_spaced(split: Split) -> Split:
    if len(split) <= MAX_IMAGES:
        return split
    return split.subset(np.linspace(0, len(split) - 1, MAX_IMAGES).round().astype(np.int64))


def _with_note(result: EvalResult, split: Split, out: Path) -> EvalResult:
    if result.total == len(split):
        return result
    note = (
        f"{result.total:,} evenly spaced images of the {len(split):,} in {split.name}, to save time. "
        f"`vitrail eval {shlex.quote(str(out))} --out FOLDER` evaluates all of them."
    )
    return dataclasses.replace(result, notes=[note, *result.notes])


def _training(result: Result) -> list[PageSection]:
    """Return a section with the curves of the run, if it has any."""
    records = RunFolder(result.out).records()
    trained, validated = ([one for one in records if one["kind"] == kind] for kind in ("train", "val"))
    if not trained:
        return []
    png = rendered(curves(trained, validated, result.headline), "png", dpi=PLOT_DPI)
    return [PageSection("Training", [Plot(png, "loss, validation and learning rate against the step")])]
