"""The rows as bars, one panel a contest: who did how much, with the share of the machine's ceiling written on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vitrail.bench.rows import Row
from vitrail.files import atomic_file

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_COLOURS = {"vitrail": "#0072B2", "timm": "#E69F00", "torchvision": "#009E73", "hf": "#CC79A7"}
_AXIS = {"throughput": "images a second", "latency": "milliseconds an image (median, to the 95th percentile)"}
_BAR = 0.34  # inches


def draw(rows: Sequence[Row], file: Path) -> None:
    """Write the figure; rows without a figure of their own are left out."""
    contests: dict[Any, list[Row]] = {}
    for row in rows:
        if row.score:
            contests.setdefault(row.contest, []).append(row)
    if not contests:
        return
    counts = [len(entries) for entries in contests.values()]
    figure = Figure(figsize=(7.2, sum(0.95 + _BAR * count for count in counts)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(counts), 1, squeeze=False, height_ratios=[1.6 + count for count in counts])[:, 0]
    for axes, entries in zip(panels, contests.values(), strict=True):
        _panel(axes, entries)
    with atomic_file(file) as temporary:
        figure.savefig(temporary, format="png", dpi=160)


def _panel(axes: Axes, rows: list[Row]) -> None:
    first, places = rows[0], range(len(rows))
    values = [_value(row) for row in rows]
    most = max(*values, *(_spread(row)[1] or 0 for row in rows))
    axes.barh(places, values, color=[_COLOURS.get(row.who, "#999999") for row in rows], height=0.72)
    for place, row in zip(places, rows, strict=True):
        low, high = _spread(row)
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color="#222222", linewidth=1)
        axes.text(max(high or 0, _value(row)) + 0.01 * most, place, _words(row), va="center", fontsize=8)
    axes.set_yticks(places, [f"{row.who} {row.mode}" for row in rows], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * most)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(_AXIS.get(first.measure, "largest batch"), fontsize=8.5)
    how = {"throughput": f", batch {first.batch}", "latency": ", one image at a time"}.get(first.measure, "")
    title = f"{first.model} {first.task}, {first.image_size} px, {first.precision}{how}\n{first.hardware}"
    axes.set_title(title, fontsize=9, loc="left")


def _value(row: Row) -> float:
    return float((row.p50_ms if row.measure == "latency" else row.score) or 0)


def _spread(row: Row) -> tuple[float | None, float | None]:
    return (row.p50_ms, row.p95_ms) if row.measure == "latency" else (row.slowest, row.fastest)


def _words(row: Row) -> str:
    if row.measure == "latency":
        return f"{_value(row):.2f} ms"
    if row.measure == "largest-batch":
        return f"{row.largest_batch:,}"
    share = f" · {row.ceiling_share:.0%} of the ceiling" if row.ceiling_share else ""
    return f"{_value(row):,.0f}{share}" if _value(row) >= 100 else f"{_value(row):.1f}{share}"
