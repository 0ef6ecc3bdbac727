"""Draw a study from its rows: lines over a numeric axis, or one mark per category; with several seeds, error bars."""

from __future__ import annotations

import math
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from vitrail.drawing.style import COLOURS, MARKERS, WIDTH, styled
from vitrail.study.definition import Metric
from vitrail.study.summary import Summary, Value, metric_name

_COLOUR_OF = {"ViT": 0, "hybrid": 2, "BiT": 1}
"""A family has the same colour in every figure."""
_CHARACTERS = 13.0
"""Of a title, per inch."""


@styled
def draw(summary: Summary) -> Figure:
    """Draw one panel per metric."""
    plot, metrics = summary.study.plot, summary.metrics
    rows = len(summary.entries)
    height = 2.9 if plot.kind == "lines" else 0.9 + 0.3 * max(rows, 2)
    figure = Figure(figsize=(WIDTH if len(metrics) > 1 else 0.62 * WIDTH, height), layout="constrained")
    panels = figure.subplots(1, max(len(metrics), 1), squeeze=False)[0]
    for number, (axes, metric) in enumerate(zip(panels, metrics, strict=False)):
        (_lines if plot.kind == "lines" else _categories)(axes, summary, metric, first=number == 0)
    title = _title(summary, figure.get_figwidth())
    figure.set_figheight(height + 0.15 * title.count("\n"))
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return figure


def _title(summary: Summary, width: float) -> str:
    """Return the title in lines that fit a width in inches."""
    first = summary.entries[0].first
    spread = f"mean of {summary.seeds} seeds, bars: standard deviation" if summary.seeds != "1" else "one seed"
    text = f"{summary.study.title}: {first.data} → {first.target}, {first.image_size} px ({spread})"
    return textwrap.fill(text, int(_CHARACTERS * width), break_on_hyphens=False)


def _lines(axes: Axes, summary: Summary, metric: Metric, *, first: bool) -> None:
    plot = summary.study.plot
    names = [one for one in summary.series if one != plot.in_every_line]
    ticks: set[float] = set()
    for number, series in enumerate(names):
        line = summary.line(series, metric)
        colour = COLOURS[_COLOUR_OF.get(series, number) % len(COLOURS)]
        marker = MARKERS[number % len(MARKERS)]
        x, values = [one[1] for one in line], [one[2] for one in line]
        heights, bars = [100 * value.mean for value in values], _bars(values)
        # Models of several sizes and lengths have no order along the axis, so their line is the best reached so far.
        if plot.x == "pretrain_flops":
            axes.errorbar(x, heights, bars, fmt=marker, color=colour, label=series, markersize=4, capsize=2, elinewidth=0.8)
            best = [max(heights[: k + 1]) for k in range(len(heights))]
            axes.step(x, best, where="post", color=colour, linewidth=1, alpha=0.6)
        else:
            axes.errorbar(x, heights, bars, marker=marker, color=colour, label=series, markersize=4, linewidth=1.2, capsize=2)
        ticks |= set(x)
    if plot.x_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))  # matplotlib's own needs math text
        axes.xaxis.set_minor_formatter(NullFormatter())
    if plot.x == "x":
        axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %" if plot.x_percent else f"{value:.3g}"))
    axes.set_xlabel(plot.x_label)
    _finish(axes, metric_name(metric, summary.rows))
    if first:
        axes.legend(loc="best")


def _categories(axes: Axes, summary: Summary, metric: Metric, *, first: bool) -> None:
    entries = summary.entries
    many = len(summary.series) > 1
    labels = [entry.name if many else entry.label for entry in entries]
    for y, entry in enumerate(entries):
        value = entry.value(metric)
        if value is None:
            axes.annotate("not measured", (0.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=7, color="#888888")
            continue
        colour = COLOURS[_COLOUR_OF.get(entry.series, 0)]
        bar = 100 * value.std if value.std is not None else None
        axes.errorbar(100 * value.mean, y, xerr=bar, fmt="o", color=colour, markersize=5, capsize=2.5, elinewidth=1)
        axes.annotate(
            f"{100 * value.mean:.1f}", (100 * value.mean, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=7
        )
    axes.set_yticks(range(len(entries)), labels if first else [""] * len(entries))
    axes.set_ylim(len(entries) - 0.5, -0.7)
    axes.grid(axis="x", visible=True)
    axes.margins(x=0.12)
    axes.set_xlabel(f"{metric_name(metric, summary.rows)}, %")


def _bars(values: list[Value]) -> list[float] | None:
    return (
        [math.nan if value.std is None else 100 * value.std for value in values]
        if any(one.std is not None for one in values)
        else None
    )


def _finish(axes: Axes, name: str) -> None:
    axes.set_ylabel(f"{name}, %")
    axes.grid(visible=True)
    axes.margins(y=0.12)
