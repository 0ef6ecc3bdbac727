"""Curves of a run, drawn from metrics.jsonl alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.files import atomic_file
from vitrail.tasks.base import lower_is_better
from vitrail.train.best_checkpoint import RAW
from vitrail.train.callbacks import Record
from vitrail.train.run import RunFolder, number_in

if TYPE_CHECKING:
    from vitrail.drawing.figure import Figure

_LARGEST = 1e38  # float32 ends there


def draw_curves(run: RunFolder, *, headline: str) -> Path | None:
    """figures/curves.png: loss, validation and learning rate against the step; None where there is nothing to draw."""
    from vitrail.drawing.style import rendered

    records = run.records()
    trained = [one for one in records if one["kind"] == "train"]
    if not trained:
        return None
    path = run.figures / "curves.png"
    with atomic_file(path) as temporary:
        temporary.write_bytes(rendered(curves(trained, [one for one in records if one["kind"] == "val"], headline), "png"))
    return path


def curves(trained: list[Record], validated: list[Record], headline: str) -> Figure:
    """Draw the records of training and validation."""
    from vitrail.drawing.figure import Figure
    from vitrail.drawing.style import COLOURS, WIDTH, styled

    blue, red, green = COLOURS[:3]

    @styled
    def drawn() -> Figure:
        figure = Figure(figsize=(1.3 * WIDTH, 2.6), layout="constrained")
        loss, quality, rate = figure.subplots(1, 3)
        steps = [one["step"] for one in trained]
        loss.plot(steps, [_drawn(one, "loss") for one in trained], color=blue, label="training")
        if validated:
            at = [one["step"] for one in validated]
            averaged = RAW + headline in validated[-1]
            label = "validation, averaged weights" if averaged else "validation"
            loss.plot(at, [_drawn(one, "loss") for one in validated], color=red, marker=".", label=label)
            if averaged:
                raw = [_drawn(one, RAW + headline) for one in validated]
                quality.plot(at, raw, color=red, alpha=0.45, linestyle="--", label="raw weights")
            quality.plot(at, [_drawn(one, headline) for one in validated], color=red, marker=".", label="averaged weights")
            if averaged:
                quality.legend()
            quality.set_title(headline.replace("_", " ") + _best(validated, headline))
        else:
            quality.text(0.5, 0.5, "no validation split", ha="center", va="center", transform=quality.transAxes)
        rate.plot(steps, [_drawn(one, "lr") for one in trained], color=green)
        loss.set_title("loss")
        rate.set_title("learning rate")
        loss.legend()
        for axes in (loss, quality, rate):
            axes.set_xlabel("step")
            axes.grid(visible=True)
        return figure

    return drawn()


def _drawn(record: Record, name: str) -> float:
    """Return a number of a record; NaN for one that no training has, and whose axis matplotlib cannot divide."""
    value = number_in(record, name)
    return value if abs(value) < _LARGEST else math.nan


def _best(validated: list[Record], headline: str) -> str:
    """Return ", best … at step …"; nothing where no validation gave a number."""
    finite = [one for one in validated if math.isfinite(number_in(one, headline))]
    if not finite:
        return ""
    best = (min if lower_is_better(headline) else max)(finite, key=lambda one: one[headline])
    return f", best {best[headline]:.4g} at step {best['step']}"
