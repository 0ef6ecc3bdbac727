"""`Run`: a run folder as an object, with its model, metrics and curves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail.api.bundle import Bundle, load
from vitrail.api.run_report import run_report
from vitrail.drawing.figure import Figure
from vitrail.errors import VitrailError, counted
from vitrail.notebook import Markup, data_frame, html_image, html_lines, html_table
from vitrail.train.config import Recipe
from vitrail.train.curves import curves
from vitrail.train.record_text import validation_text
from vitrail.train.result import Result, finished
from vitrail.train.run import RunFolder


class Records(list[dict[str, Any]]):
    """The records of a run: `train`, `val` and, of a finished run, `end`."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(dict(one) for one in records)

    def of(self, kind: str) -> Records:
        """Return the records of one kind: "train", "val" or "end"."""
        return Records([one for one in self if one["kind"] == kind])

    def to_pandas(self) -> Any:
        """Return a DataFrame with one row per record. Speeds are columns such as `speed.images_per_second`."""
        rows = [_flat(one) for one in self]
        names = list(dict.fromkeys(name for row in rows for name in row))
        return data_frame({name: [row.get(name) for row in rows] for name in names})

    def __repr__(self) -> str:
        kinds = ", ".join(f"{len(self.of(kind))} {kind}" for kind in dict.fromkeys(one["kind"] for one in self))
        return f"Records({kinds})"

    def _repr_html_(self) -> str:
        rows = [_flat(one) for one in self]
        names = [name for name in dict.fromkeys(name for row in rows for name in row) if not name.startswith("speed.")]
        return html_table(names, [[row.get(name, "") for name in names] for row in rows])


def _flat(record: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return flat


class Run:
    """A run: what it was (`recipe`), what it did (`metrics`, `curves()`), and its model (`bundle`)."""

    def __init__(self, out: str | os.PathLike[str], result: Result | None = None) -> None:
        self.out = Path(out)
        """The run folder."""
        self.result = result
        """How it ended; None if it is not finished."""
        self._folder = RunFolder(out)

    @property
    def recipe(self) -> Recipe:
        """Everything that decided the run."""
        saved = self._folder.saved_recipe()
        if saved is None:
            raise VitrailError(f"{self.out} holds no run. Pass a folder that `vitrail train` or `finetune` wrote.")
        return saved

    @property
    def metrics(self) -> Records:
        """The records of training and validation so far."""
        return Records(self._folder.records())

    @cached_property
    def bundle(self) -> Bundle:
        """The trained model, loaded."""
        if not self._folder.model.exists():
            raise VitrailError(f"The run in {self.out} is not finished and has no model yet. Run it again to resume.")
        return load(self.out)

    @property
    def report(self) -> Path | None:
        """The page that the run ended with: an evaluation, or reconstructions of a masked run; None if there is none."""
        return run_report(self.out)

    def curves(self) -> Figure:
        """Draw loss, validation and learning rate against the step."""
        records = self.metrics
        if not records.of("train"):
            raise VitrailError(f"The run in {self.out} has no metrics yet, so there are no curves to draw. Run it again to resume.")
        return curves(records.of("train"), records.of("val"), self._headline())

    def summary(self) -> dict[str, Any]:
        """Return plain values for JSON, as `vitrail finetune --json` prints them."""
        if self.result is None:
            raise VitrailError(f"The run in {self.out} is not finished. Run it again to resume.")
        return {**self.result.summary(), "report": None if self.report is None else str(self.report)}

    def _headline(self) -> str:
        if self.result is not None:
            return self.result.headline
        known = ("accuracy", "map", "mae", "relative_loss")
        validated = self.metrics.of("val")
        return next((name for name in known if validated and name in validated[-1]), "loss")

    def _state(self) -> str:
        if self.result is None:
            return "not finished"
        if self.result.ended_by is not None:
            return f"interrupted after {counted(self.result.steps, 'step')}; call again to resume"
        metrics = validation_text(self.result.metrics) if self.result.metrics else "no validation"
        return f"{counted(self.result.steps, 'step')}, {metrics}"

    def __repr__(self) -> str:
        return f"Run({str(self.out)!r}, {self._state()})"

    def _repr_html_(self) -> str:
        records = self.metrics
        drawn = html_image(self.curves()._repr_png_(), "curves") if records.of("train") else ""
        rows = [[one["step"], validation_text(one)] for one in records.of("val")[-5:]]
        table = html_table(["step", "validation"], rows) if rows else ""
        return Markup(html_lines([f"{self.out}: {self._state()}"]) + drawn + table)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Open the folder of a run, finished or not, to look at its metrics and use its model."""
    run = RunFolder(Path(folder).expanduser())
    if not run.path.is_dir():
        raise VitrailError(f"There is no folder {folder}. Pass a run folder, such as runs/digits.")
    if run.saved_recipe() is None:
        raise VitrailError(f"{folder} holds no run: it has no config.json of one. Pass a folder that `vitrail train` wrote.")
    end = run.end()
    return Run(run.path, finished(run, end) if end is not None else None)
