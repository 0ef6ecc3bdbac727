"""How every figure looks, and how arrays become pictures.

Figures are drawn without pyplot: nothing global is touched, and no window system is needed. The colours are Okabe and Ito's,
which people with any kind of colour vision can tell apart; maps are matplotlib's perceptually even cividis and viridis.
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
_PIXELS = 200  # an inch

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
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
    "svg.hashsalt": "vitrail",  # the same figure gives the same file
    "svg.fonttype": "path",
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """A drawing function in the common style."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def rendered(figure: Figure, form: str) -> bytes:
    """The figure as a file's content, "png" or "svg"."""
    content = io.BytesIO()
    figure.draw_without_rendering()  # lays it out once; laid out again for each form, parts would shift between them
    figure.set_layout_engine("none")
    metadata = {"Date": None, "Creator": "Vitrail"} if form == "svg" else {"Software": "Vitrail"}
    with mpl.rc_context(_STYLE):
        figure.savefig(content, format=form, dpi=_PIXELS, bbox_inches="tight", pad_inches=0.06, metadata=metadata)
    return content.getvalue()


def tight(figure: Figure, gap: float = 0.02) -> None:
    """Little room between the parts of a figure, in inches."""
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(w_pad=gap, h_pad=gap, wspace=0.0, hspace=0.0)


def bare(axes: Axes) -> None:
    """No ticks and no frame: for pictures."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def fitted(height: float, width: float, most: tuple[float, float]) -> tuple[float, float]:
    """(wide, tall) in inches for something of these proportions that is to stay within `most` (wide, tall)."""
    scale = min(most[0] / width, most[1] / height)
    return width * scale, height * scale


def mosaic(tiles: Array, gap: int = 1) -> Array:
    """Tiles [row, column, height, width, …] as one picture; the gaps between are NaN, which is drawn as nothing."""
    rows, columns, height, width = tiles.shape[:4]
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, *tiles.shape[4:]), np.nan)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + gap), column * (width + gap)
            sheet[top : top + height, left : left + width] = tiles[row, column]
    return sheet


def filled_grid(tiles: Array, columns: int) -> Array:
    """[tile, …] as [row, column, …]; the last row is filled up with NaN."""
    rows = -(-len(tiles) // columns)
    grid = np.full((rows * columns, *tiles.shape[1:]), np.nan)
    grid[: len(tiles)] = tiles
    return grid.reshape(rows, columns, *tiles.shape[1:])


def even_steps(count: int, most: int) -> list[int]:
    """Of `count` rows or columns, those to show: all, or evenly many up to `most`, always from the first."""
    step = -(-count // most)
    return list(range(0, count, step))


def attention_mask(values: Array, size: tuple[int, int], blur: float) -> Array:
    """A map [row, column] smoothly over an image of `size` (height, width), from 0 to 1, as the authors drew it.

    Divided by its maximum, enlarged by Lanczos, blurred by a Gaussian of one patch, and stretched to the full range. A map
    without any difference stays without: it becomes zeros where it is zero and ones elsewhere.
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
    """The picture [height, width, 3] as bright as the mask says."""
    return picture * mask[..., None]
