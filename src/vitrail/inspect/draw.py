"""Draw filters, position similarity and mean attention distance (Fig. 7, Fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vitrail.drawing.figure import Figure
from vitrail.drawing.style import COLOURS, MAP, MARKERS, WIDTH, bare, fitted, styled, tight
from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array
from vitrail.inspect.pictures import even_steps, filled_grid, mosaic
from vitrail.inspect.weights import Filters

_MAX_TILES = 16  # small maps along an axis of the position figure
_RAW_COLUMNS = 32


@styled
def draw_filters(filters: Filters, title: str = "") -> Figure:
    """Draw the principal components, strongest first, with the explained variance under each."""
    count, channels = filters.components.shape[:2]
    columns = min(7, count)
    rows = -(-count // columns)
    height, width = filters.components.shape[2:]
    wide, tall = fitted(height, width, (WIDTH * 0.72 / columns, 1.4))
    figure = Figure(figsize=(max(wide * columns, 3.4), (tall + 0.12) * rows + 0.3), layout="constrained")
    tight(figure, 0.03)
    axes = figure.subplots(rows, columns, squeeze=False)
    for number, one in enumerate(axes.flat):
        bare(one)
        if number < count:
            one.imshow(filter_picture(filters.components[number]), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            one.set_xlabel(f"{filters.explained_variance_ratio[number]:.1%}", fontsize=6.5, labelpad=2, color="#444444")
    averaged = "" if channels in (1, 3) else f", mean over {channels} channels"
    components = "1 principal component" if count == 1 else f"{count} principal components"
    figure.suptitle(f"{title}First-layer filters: {components} with explained variance{averaged}", fontsize=9)
    return figure


@styled
def draw_raw_filters(filters: Filters, title: str = "") -> Figure:
    """Draw all filters in the model's order, each scaled to the full range of brightness."""
    pictures = np.stack([filter_picture(one) for one in filters.raw])
    columns = min(_RAW_COLUMNS, len(pictures))
    sheet = np.nan_to_num(mosaic(filled_grid(pictures, columns)), nan=1.0)
    averaged = "" if filters.raw.shape[1] in (1, 3) else f", mean over {filters.raw.shape[1]} channels"
    wide, tall = fitted(sheet.shape[0], sheet.shape[1], (WIDTH, 2 * WIDTH))
    figure = Figure(figsize=(max(wide, 3.4), tall + 0.3), layout="constrained")
    axes = figure.subplots()
    bare(axes)
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(f"{title}All {len(pictures)} first-layer filters{averaged}")
    return figure


def filter_picture(values: Array) -> Array:
    """Map a filter [channel, height, width] to values from 0 to 1: RGB for three channels, else grey. Zero is mid-grey."""
    picture = values.transpose(1, 2, 0) if len(values) == 3 else values.mean(axis=0)
    return np.asarray(picture / max(2 * float(np.abs(picture).max()), 1e-30) + 0.5)


@styled
def draw_positions(similarity: Array, title: str = "") -> Figure:
    """Draw a grid of maps: the map at (r, c) shows the similarity of that patch's position embedding to all others."""
    rows, columns = similarity.shape[:2]
    shown_rows, shown_columns = even_steps(rows, _MAX_TILES), even_steps(columns, _MAX_TILES)
    gap = max(1, round(0.12 * min(rows, columns)))
    sheet = mosaic(similarity[np.ix_(shown_rows, shown_columns)], gap)
    wide, tall = fitted(sheet.shape[0], sheet.shape[1], (WIDTH * 0.72, WIDTH))
    figure = Figure(figsize=(max(wide, 3.4) + 0.9, max(tall, 1.2) + 0.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(sheet, cmap=MAP, vmin=-1, vmax=1, interpolation="nearest")
    axes.set_xticks([number * (columns + gap) + (columns - 1) / 2 for number in range(len(shown_columns))], map(str, shown_columns))
    axes.set_yticks([number * (rows + gap) + (rows - 1) / 2 for number in range(len(shown_rows))], map(str, shown_rows))
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xlabel("patch column")
    axes.set_ylabel("patch row")
    complete = len(shown_rows) * len(shown_columns) == rows * columns
    subset = "" if complete else f", {len(shown_rows)}×{len(shown_columns)} of them shown"
    axes.set_title(f"{title}Position embedding similarity, {rows}×{columns} patches{subset}")
    figure.colorbar(image, ax=axes, shrink=0.8, aspect=28, label="cosine similarity").outline.set_visible(False)
    return figure


@styled
def draw_distance(
    distances: Array,
    *,
    uniform: float,
    images: int,
    layers: Sequence[int] | None = None,
    other: Array | None = None,
    title: str = "",
) -> Figure:
    """Draw the mean attention distance of every head by layer (Fig. 7 right, Fig. 11), with the value of uniform attention.

    `distances` [layer, head] are among patches; `other`, the second convention, is drawn faintly behind. `layers` are the
    layer indices if `distances` has only some layers.
    """
    figure = Figure(figsize=(WIDTH * 0.78, 3.1), layout="constrained")
    axes = figure.subplots()
    depth = np.arange(len(distances)) if layers is None else np.array(layers)
    if other is not None:
        _heads(axes, depth, other, "#bbbbbb", "x", "head, prefix tokens counted as 0 pixels")
    _heads(axes, depth, distances, COLOURS[0], "o", "head, among patches")
    axes.plot(depth, distances.mean(axis=1), color=COLOURS[1], linewidth=1.2, label="mean over heads", zorder=3)
    axes.axhline(uniform, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)), label="uniform attention", zorder=1)
    _distance_axes(axes, depth)
    axes.set_title(f"{title}Mean attention distance over {_count_images(images)}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@styled
def draw_distance_comparison(
    models: Mapping[str, Array], *, layers: Mapping[str, Array], uniform: Sequence[float], images: int
) -> Figure:
    """Compare checkpoints layer by layer: dots are heads, lines their mean, dashed lines uniform attention."""
    if len(models) > len(COLOURS):
        raise VitrailError(f"{len(models)} checkpoints are too many for one figure; compare at most {len(COLOURS)}.")
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    for number, (name, distances) in enumerate(models.items()):
        colour, marker = COLOURS[number], MARKERS[number]
        depth = layers[name]
        offset = (number - (len(models) - 1) / 2) * 0.6 / len(models)
        _heads(axes, depth + offset, distances, colour, marker, None)
        axes.plot(depth, distances.mean(axis=1), color=colour, marker=marker, markersize=4, linewidth=1.3, label=name, zorder=3)
    for level in sorted(set(uniform)):
        colour = COLOURS[list(uniform).index(level)] if len(set(uniform)) > 1 else "#444444"
        axes.axhline(level, color=colour, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    _distance_axes(axes, np.concatenate(list(layers.values())))
    axes.set_title(
        f"Mean attention distance over {_count_images(images)} (dots: heads, lines: mean over heads, dashed: uniform attention)"
    )
    figure.legend(loc="outside lower center", ncols=min(len(models), 3))
    return figure


def _count_images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def _heads(axes: Axes, depth: Array, distances: Array, colour: str, marker: str, label: str | None) -> None:
    x = np.repeat(depth, distances.shape[1])
    edge = {} if marker == "x" else {"edgecolors": "none"}
    axes.scatter(x, distances.ravel(), s=11, c=colour, marker=marker, alpha=0.6, linewidths=0.7, label=label, zorder=2, **edge)  # type: ignore[arg-type]


def _distance_axes(axes: Axes, layers: Array) -> None:
    axes.set_ylim(0, 1.06 * axes.dataLim.y1)
    axes.set_xlim(layers.min() - 0.6, layers.max() + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("layer (from 0)")
    axes.set_ylabel("mean attention distance (pixels)")
