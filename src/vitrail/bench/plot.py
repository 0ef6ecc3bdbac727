"""Plot results as bars: one panel per comparison, each bar labelled with its fraction of the matmul peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitrail.bench.results import Row, by_comparison
from vitrail.drawing.style import COLOURS, rendered, styled
from vitrail.files import atomic_file

_COLOURS = {"vitrail": COLOURS[0], "timm": COLOURS[4], "torchvision": COLOURS[2], "hf": COLOURS[3]}
_X_LABELS = {"throughput": "images/s", "latency": "ms per image (median, line to the 95th percentile)"}
_BAR_INCHES = 0.34


def plot(rows: Sequence[Row], file: Path) -> None:
    """Write a PNG. Rows without a score are left out; without any score no file is written."""
    comparisons = by_comparison(row for row in rows if row.score)
    if not comparisons:
        return
    with atomic_file(file) as temporary:
        temporary.write_bytes(rendered(_figure(comparisons), "png", dpi=160))


@styled
def _figure(comparisons: Mapping[Any, list[Row]]) -> Figure:
    counts = [len(entries) for entries in comparisons.values()]
    figure = Figure(figsize=(7.2, sum(0.95 + _BAR_INCHES * count for count in counts)), layout="constrained")
    panels = figure.subplots(len(counts), 1, squeeze=False, height_ratios=[1.6 + count for count in counts])[:, 0]
    for axes, entries in zip(panels, comparisons.values(), strict=True):
        _panel(axes, entries)
    return figure


def _panel(axes: Axes, rows: list[Row]) -> None:
    first, heights = rows[0], range(len(rows))
    values = [_value(row) for row in rows]
    largest = max(*values, *(_range(row)[1] or 0 for row in rows))
    axes.barh(heights, values, color=[_COLOURS.get(row.library, "#999999") for row in rows], height=0.72)
    for y, row in zip(heights, rows, strict=True):
        low, high = _range(row)
        if low is not None and high is not None:
            axes.plot([low, high], [y, y], color="#222222", linewidth=1)
        axes.text(max(high or 0, _value(row)) + 0.01 * largest, y, _label(row), va="center", fontsize=8)
    axes.set_yticks(heights, [f"{row.library} {row.mode}" for row in rows], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * largest)
    axes.set_xlabel(_X_LABELS.get(first.metric, "largest batch"), fontsize=8.5)
    batch = {"throughput": f", batch {first.batch}", "latency": ", batch 1"}.get(first.metric, "")
    title = f"{first.model} {first.task}, {first.image_size} px, {first.precision}{batch}\n{first.hardware}"
    axes.set_title(title, fontsize=9, loc="left")


def _value(row: Row) -> float:
    return float((row.p50_ms if row.metric == "latency" else row.score) or 0)


def _range(row: Row) -> tuple[float | None, float | None]:
    return (row.p50_ms, row.p95_ms) if row.metric == "latency" else (row.min_images_per_s, row.max_images_per_s)


def _label(row: Row) -> str:
    if row.metric == "latency":
        return f"{_value(row):.2f} ms"
    if row.metric == "largest-batch":
        return f"{row.largest_batch:,}"
    fraction = f" · {row.peak_fraction:.0%} of matmul peak" if row.peak_fraction else ""
    return f"{_value(row):,.0f}{fraction}" if _value(row) >= 100 else f"{_value(row):.1f}{fraction}"
