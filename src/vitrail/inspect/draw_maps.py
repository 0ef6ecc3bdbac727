"""Draw attention maps over images: rollout (Fig. 6, Fig. 14), comparisons, and attention of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from vitrail.drawing.figure import Figure
from vitrail.drawing.style import MAP, WIDTH, bare, fitted, styled, tight
from vitrail.inspect.inputs import Array
from vitrail.inspect.pictures import attention_mask, dimmed, mosaic

_HEAD_TILE = 0.6  # maximum size of one head's map in inches


@dataclass(frozen=True)
class Column:
    """A column of maps [image, row, column] to compare with other columns, and the pictures below the maps."""

    heading: str
    maps: Array
    pictures: Sequence[Array]
    signed: bool = False
    """False: attention, which sets the brightness of the picture. True: similarity, drawn with a colour map over its range."""


@styled
def draw_rollout(pictures: Sequence[Array], maps: Array, *, labels: Sequence[str] = (), title: str = "") -> Figure:
    """Draw pairs of images: the input, and the input multiplied by its attention, as in the paper."""
    pairs = min(len(pictures), 4)
    rows = -(-len(pictures) // pairs)
    height, width = pictures[0].shape[:2]
    wide, tall = fitted(height, width, (min(WIDTH / (2 * pairs), 1.7), 2.4))
    line = 0.28 if labels else 0.02
    figure = Figure(figsize=(max(2 * pairs * wide, 3.4), rows * (tall + line) + 0.3), layout="constrained")
    tight(figure, 0.012)
    axes = figure.subplots(rows, pairs, squeeze=False).flat
    for number, one in enumerate(axes):
        bare(one)
        if number < len(pictures):
            picture = pictures[number]
            separator = np.ones((height, max(1, width // 60), 3))
            one.imshow(np.concatenate([picture, separator, overlay(picture, maps[number])], axis=1))
            if labels:
                one.set_title(labels[number], fontsize=6, loc="left", pad=2, color="#444444", linespacing=1.15)
    figure.suptitle(f"{title}Input (left) and attention rollout (right)", fontsize=9)
    return figure


def overlay(picture: Array, values: Array) -> Array:
    """Multiply the picture by a map, smoothed over one patch."""
    size = (picture.shape[0], picture.shape[1])
    return dimmed(picture, attention_mask(values, size, blur=size[0] / values.shape[0]))


@styled
def draw_columns(pictures: Sequence[Array], columns: Sequence[Column], *, labels: Sequence[str] = (), title: str = "") -> Figure:
    """Draw one row per image and one column per kind of map or per checkpoint."""
    height, width = pictures[0].shape[:2]
    wide, tall = fitted(height, width, (min(WIDTH / (len(columns) + 1), 1.4), 2.4))
    line = 0.16 if any(column.signed for column in columns) else 0.0
    size = (wide * (len(columns) + 1), len(pictures) * (tall + line) + (0.55 if title else 0.35))
    figure = Figure(figsize=size, layout="constrained")
    tight(figure, 0.015)
    axes = figure.subplots(len(pictures), len(columns) + 1, squeeze=False)
    for row, picture in enumerate(pictures):
        axes[row, 0].imshow(picture)
        for number, column in enumerate(columns):
            _draw_map(axes[row, number + 1], column, row)
        if labels:
            axes[row, 0].set_ylabel(labels[row], fontsize=6, color="#444444", linespacing=1.2)
    for one in axes.flat:
        bare(one)
    for one, heading in zip(axes[0], ["input", *(column.heading for column in columns)], strict=True):
        one.set_title(heading, fontsize=7.5)
    if title:
        figure.suptitle(title, fontsize=9)
    return figure


def _draw_map(axes: Axes, column: Column, number: int) -> None:
    picture, values = column.pictures[number], column.maps[number]
    if not column.signed:
        axes.imshow(overlay(picture, values))
        return
    height, width = picture.shape[:2]
    axes.imshow(values, cmap=MAP, interpolation="nearest", extent=(0, width, height, 0))
    axes.set_xlabel(f"{values.min():.2f} to {values.max():.2f}", fontsize=6.5, labelpad=1, color="#444444")


@styled
def draw_heads(picture: Array, attention: Array, query: tuple[int, int], *, layers: Sequence[int], title: str = "") -> Figure:
    """Draw the attention [layer, head, row, column] of each head (column) and layer (row) from one query patch.

    Each map is scaled from 0 to its own maximum. The query patch (row, column) is framed in the picture.
    """
    count, heads, rows, columns = attention.shape
    highest = attention.max(axis=(2, 3), keepdims=True)
    sheet = mosaic(attention / np.where(highest > 0, highest, 1), gap=max(1, round(0.12 * min(rows, columns))))
    height, width = picture.shape[:2]
    picture_wide, picture_tall = fitted(height, width, (1.5, 3.0))
    wide, tall = fitted(sheet.shape[0], sheet.shape[1], (min(WIDTH - 1.9, _HEAD_TILE * heads), 2 * WIDTH))
    figure = Figure(figsize=(picture_wide + wide + 0.4, max(tall, picture_tall) + 0.65), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(picture_wide, wide))
    left.imshow(picture)
    bare(left)
    patch = (width / columns, height / rows)
    corner = (query[1] * patch[0] - 0.5, query[0] * patch[1] - 0.5)
    for colour, line in (("black", 2.4), ("white", 1.2)):
        left.add_patch(Rectangle(corner, *patch, fill=False, edgecolor=colour, linewidth=line))
    left.set_anchor("N")
    left.set_title(f"query: row {query[0]}, column {query[1]}", fontsize=7.5)
    right.imshow(sheet, cmap=MAP, vmin=0, vmax=1, interpolation="nearest")
    _number_tiles(right, sheet, count, heads, layers)
    right.set_anchor("N")
    right.set_title(f"{title}attention of each head", fontsize=7.5)
    return figure


def _number_tiles(axes: Axes, sheet: Array, count: int, heads: int, layers: Sequence[int]) -> None:
    height, width = sheet.shape[0] / count, sheet.shape[1] / heads
    axes.set_xticks([(head + 0.5) * width - 0.5 for head in range(heads)], map(str, range(heads)))
    axes.set_yticks([(row + 0.5) * height - 0.5 for row in range(count)], map(str, layers))
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
