"""Curves of a run, drawn from metrics.jsonl alone."""

from __future__ import annotations

import math
from pathlib import Path

from vitrail.files import atomic_file
from vitrail.tasks.base import lower_is_better
from vitrail.train.best_checkpoint import RAW
from vitrail.train.callbacks import Record
from vitrail.train.run import RunFolder, number_in


def draw_curves(run: RunFolder, *, headline: str) -> Path | None:
    """figures/curves.png: loss, validation and learning rate against the step; None where there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = run.records()
    trained = [one for one in records if one["kind"] == "train"]
    validated = [one for one in records if one["kind"] == "val"]
    if not trained:
        return None
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, quality, rate = figure.subplots(1, 3)
    steps = [one["step"] for one in trained]
    loss.plot(steps, [number_in(one, "loss") for one in trained], color="#2b6ca3", label="training")
    if validated:
        at = [one["step"] for one in validated]
        averaged = RAW + headline in validated[-1]
        label = "validation, averaged weights" if averaged else "validation"
        loss.plot(at, [number_in(one, "loss") for one in validated], color="#c8553d", marker=".", label=label)
        if averaged:
            raw = [number_in(one, RAW + headline) for one in validated]
            quality.plot(at, raw, color="#c8553d", alpha=0.45, linestyle="--", label="raw weights")
        quality.plot(at, [number_in(one, headline) for one in validated], color="#c8553d", marker=".", label="averaged weights")
        if averaged:
            quality.legend(frameon=False, fontsize=9)
        quality.set_title(headline.replace("_", " ") + _best(validated, headline), fontsize=10)
    else:
        quality.text(0.5, 0.5, "no validation split", ha="center", va="center", transform=quality.transAxes)
    rate.plot(steps, [number_in(one, "lr") for one in trained], color="#5b8c5a")
    loss.set_title("loss", fontsize=10)
    rate.set_title("learning rate", fontsize=10)
    loss.legend(frameon=False, fontsize=9)
    for axes in (loss, quality, rate):
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    path = run.figures / "curves.png"
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path


def _best(validated: list[Record], headline: str) -> str:
    """Return ", best … at step …"; nothing where no validation gave a number."""
    finite = [one for one in validated if math.isfinite(number_in(one, headline))]
    if not finite:
        return ""
    best = (min if lower_is_better(headline) else max)(finite, key=lambda one: one[headline])
    return f", best {best[headline]:.4g} at step {best['step']}"
