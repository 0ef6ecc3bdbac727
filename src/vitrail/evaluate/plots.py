"""Draw the plots of an evaluation report, each as the bytes of a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vitrail.evaluate.classification import Calibration
from vitrail.text import printable

Array = npt.NDArray[Any]
_INK, _FAINT, _BLUE, _RED, _GREEN = "#24292f", "#d0d4d9", "#2f5d8a", "#c4493d", "#7fb285"


def reliability(calibration: Calibration) -> bytes:
    """Plot accuracy against confidence, and the fraction of images in each bin below."""
    figure = _figure(5.6, 6.0)
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
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    lower.bar(centres, count / max(count.sum(), 1), width=width * 0.92, color=_FAINT)
    lower.set(xlabel="confidence", ylabel="fraction of images")
    return _png(figure, (upper, lower))


def confusion(matrix: Array, classes: Sequence[str]) -> bytes:
    """Plot a confusion matrix, normalised by row (true class), with counts where they fit."""
    count = len(classes)
    side = min(max(4.0, 1.8 + 0.42 * count), 16.0)
    figure = _figure(side + 0.6, side)
    axes = figure.subplots()
    fractions = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="fraction of the true class")
    axes.set(xlabel="predicted class", ylabel="true class")
    if count <= 60:
        axes.set_xticks(
            range(count), [_short(name) for name in classes], rotation=60, ha="right", rotation_mode="anchor", fontsize=8
        )
        axes.set_yticks(range(count), [_short(name) for name in classes], fontsize=8)
    if count <= 20:
        for row, column in np.ndindex(count, count):
            if matrix[row, column]:
                dark = fractions[row, column] > 0.5
                axes.text(
                    column, row, f"{matrix[row, column]:.0f}", ha="center", va="center", fontsize=7, color="white" if dark else _INK
                )
    return _png(figure, ())


def sizes(labels: Sequence[str], values: Sequence[float], intervals: Sequence[tuple[float, float]], name: str) -> bytes:
    """Plot one metric at several input sizes."""
    figure = _figure(5.2, 3.2)
    axes = figure.subplots()
    middle = np.array(values)
    spread = np.abs(np.array(intervals).T - middle)
    axes.errorbar(range(len(labels)), middle, yerr=spread, color=_BLUE, marker="o", capsize=4, linewidth=1.5)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="input size", ylabel=name)
    return _png(figure, (axes,))


def scatter(predicted: Array, truth: Array, name: str) -> bytes:
    """Plot predicted against true values of one target."""
    figure = _figure(4.4, 4.2)
    axes = figure.subplots()
    ends = [float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))]
    axes.plot(ends, ends, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.scatter(truth, predicted, s=8, alpha=min(1.0, 200 / len(truth) ** 0.75 + 0.05), color=_BLUE, linewidths=0)
    axes.set(xlabel=f"true {_short(name)}", ylabel=f"predicted {_short(name)}")
    return _png(figure, (axes,))


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure, plain: Sequence[Any]) -> bytes:
    for axes in plain:
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()


def _short(name: str) -> str:
    name = printable(name, one_line=True)
    return (name if len(name) <= 22 else name[:21] + "…").replace("$", r"\$")  # not a formula
