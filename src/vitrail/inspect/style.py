"""The common style of all figures, and helpers that turn arrays into pictures.

Figures are drawn without pyplot: no global state, and no display is needed. The colours are Okabe and Ito's palette, which is
safe for colour-blind readers; maps use matplotlib's perceptually uniform viridis.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image, ImageFilter

from vitrail.inspect.inputs import Array

P = ParamSpec("P")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MAP = "viridis"
WIDTH = 6.8  # inches: the text width of a page
_DPI = 200

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "text.parse_math": False,  # a file name may contain $
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#444444",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "vitrail",  # identical figures give identical files
    "svg.fonttype": "path",
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a drawing function so that it uses the common style."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def rendered(figure: Figure, format_: str) -> bytes:
    """Render the figure as "png" or "svg"."""
    content = io.BytesIO()
    figure.draw_without_rendering()  # fixes the layout once; otherwise PNG and SVG would differ slightly
    figure.set_layout_engine("none")
    metadata = {"Date": None, "Creator": "Vitrail"} if format_ == "svg" else {"Software": "Vitrail"}
    with mpl.rc_context(_STYLE):
        figure.savefig(content, format=format_, dpi=_DPI, bbox_inches="tight", pad_inches=0.06, metadata=metadata)
    return content.getvalue()


def tight(figure: Figure, gap: float = 0.02) -> None:
    """Set small gaps between the axes of a figure, in inches."""
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(w_pad=gap, h_pad=gap, wspace=0.0, hspace=0.0)


def bare(axes: Axes) -> None:
    """Remove ticks and frame, for pictures."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def fitted(height: float, width: float, limit: tuple[float, float]) -> tuple[float, float]:
    """Return (width, height) in inches that keep the aspect ratio and fit into `limit` (width, height)."""
    scale = min(limit[0] / width, limit[1] / height)
    return width * scale, height * scale


def mosaic(tiles: Array, gap: int = 1) -> Array:
    """Arrange tiles [row, column, height, width, …] in one picture. Gaps are NaN, which matplotlib leaves blank."""
    rows, columns, height, width = tiles.shape[:4]
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, *tiles.shape[4:]), np.nan)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + gap), column * (width + gap)
            sheet[top : top + height, left : left + width] = tiles[row, column]
    return sheet


def filled_grid(tiles: Array, columns: int) -> Array:
    """Reshape [tile, …] to [row, column, …]; the last row is padded with NaN."""
    rows = -(-len(tiles) // columns)
    grid = np.full((rows * columns, *tiles.shape[1:]), np.nan)
    grid[: len(tiles)] = tiles
    return grid.reshape(rows, columns, *tiles.shape[1:])


def even_steps(count: int, limit: int) -> list[int]:
    """Choose at most `limit` evenly spaced indices below `count`, starting at 0."""
    step = -(-count // limit)
    return list(range(0, count, step))


def attention_mask(values: Array, size: tuple[int, int], blur: float) -> Array:
    """Resize a map [row, column] smoothly to `size` (height, width), from 0 to 1, as the authors draw it.

    The map is divided by its maximum, enlarged with Lanczos, blurred with a Gaussian of one patch, and rescaled to the full
    range. A constant map is not rescaled: it becomes all zeros if it is zero, else all ones.
    """
    top = float(values.max())
    if top <= 0 or float(values.min()) == top:
        return np.full(size, float(top > 0))
    small = Image.fromarray((values / top).astype(np.float32))
    large = small.resize((size[1], size[0]), Image.Resampling.LANCZOS)
    grey = Image.fromarray((np.asarray(large).clip(0, 1) * 255).round().astype(np.uint8))
    mask = np.asarray(grey.filter(ImageFilter.GaussianBlur(radius=blur)), dtype=np.float64)
    mask -= mask.min()
    return np.asarray(mask / max(mask.max(), 1.0))


def dimmed(picture: Array, mask: Array) -> Array:
    """Multiply the picture [height, width, 3] by the mask."""
    return picture * mask[..., None]
