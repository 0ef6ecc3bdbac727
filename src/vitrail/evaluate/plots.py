"""Draw the plots of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.drawing.figure import Figure
from vitrail.drawing.style import COLOURS, styled
from vitrail.evaluate.classification import Calibration
from vitrail.text import printable

Array = npt.NDArray[Any]
_INK, _FAINT = "#24292f", "#d0d4d9"
_BLUE, _RED, _GREEN = COLOURS[:3]


@styled
def reliability(calibration: Calibration) -> Figure:
    """Plot accuracy against confidence, and the fraction of images in each bin below."""
    figure = _figure(5.0, 5.4)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges, count = calibration.edges, calibration.count
    centres, width = (edges[:-1] + edges[1:]) / 2, 1 / len(count)
    filled = count > 0
    upper.plot([0, 1], [0, 1], color=_INK, linewidth=1, linestyle=(0, (4, 3)), label="perfect calibration")
    accuracy, confidence = calibration.accuracy[filled], calibration.confidence[filled]
    bars: dict[str, Any] = {"x": centres[filled], "width": width * 0.92}
    upper.bar(height=accuracy, color=_BLUE, label="accuracy", **bars)
    above, below = np.maximum(confidence - accuracy, 0), np.maximum(accuracy - confidence, 0)
    upper.bar(height=above, bottom=accuracy, color=_RED, alpha=0.35, label="missing to the confidence (overconfident)", **bars)
    upper.bar(height=below, bottom=confidence, color=_GREEN, label="accuracy above the confidence (underconfident)", **bars)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=f"expected calibration error: {calibration.ece:.1%}")
    figure.legend(loc="outside lower center", ncols=2)
    lower.bar(centres, count / max(count.sum(), 1), width=width * 0.92, color=_FAINT)
    lower.set(xlabel="confidence", ylabel="fraction of images")
    return figure


@styled
def confusion(matrix: Array, classes: Sequence[str]) -> Figure:
    """Plot a confusion matrix, normalised by row (true class), with all class names, and with counts where they fit."""
    count = len(classes)
    cell = max(0.09, min(0.42, 14 / count))  # inches
    side = max(3.4, 1.8 + cell * count)
    figure = _figure(side + 0.6, side)
    axes = figure.subplots()
    fractions = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=4 * side, label="fraction of the true class")
    axes.set(xlabel="predicted class", ylabel="true class")
    size = min(8.0, 0.75 * 72 * cell)  # points: three quarters of a row
    names = [_short(name) for name in classes]
    upright: dict[str, Any] = {"rotation": 90} if count > 60 else {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(count), names, fontsize=size, **upright)
    axes.set_yticks(range(count), names, fontsize=size)
    axes.tick_params(length=0 if count > 60 else 2.5)
    if count <= 20:
        for row, column in np.ndindex(count, count):
            if matrix[row, column]:
                colour = "white" if fractions[row, column] > 0.5 else _INK
                axes.text(column, row, f"{matrix[row, column]:.0f}", ha="center", va="center", fontsize=7, color=colour)
    return figure


@styled
def sizes(labels: Sequence[str], values: Sequence[float], intervals: Sequence[tuple[float, float]], name: str) -> Figure:
    """Plot one metric at several input sizes."""
    figure = _figure(5.2, 3.2)
    axes = figure.subplots()
    middle = np.array(values)
    spread = np.abs(np.array(intervals).T - middle)
    axes.errorbar(range(len(labels)), middle, yerr=spread, color=_BLUE, marker="o", capsize=4, linewidth=1.5)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="input size", ylabel=name)
    return figure


@styled
def scatter(predicted: Array, truth: Array, name: str) -> Figure:
    """Plot predicted against true values of one target."""
    figure = _figure(4.4, 4.2)
    axes = figure.subplots()
    ends = [float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))]
    axes.plot(ends, ends, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.scatter(truth, predicted, s=8, alpha=min(1.0, 200 / len(truth) ** 0.75 + 0.05), color=_BLUE, linewidths=0)
    axes.set(xlabel=f"true {_short(name)}", ylabel=f"predicted {_short(name)}")
    return figure


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _short(name: str) -> str:
    name = printable(name, one_line=True)
    return name if len(name) <= 22 else name[:21] + "…"
