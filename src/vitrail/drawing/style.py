"""The common style of all figures.

Figures are drawn without pyplot: no global state, and no display is needed. The colours are Okabe and Ito's palette, which is
safe for colour-blind readers; maps use matplotlib's perceptually uniform viridis.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

log = logging.getLogger("vitrail.drawing")
P = ParamSpec("P")
F = TypeVar("F", bound=Figure)

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MAP = "viridis"
WIDTH = 6.8  # inches: the text width of a page
_DPI = 200
# Fonts of other scripts, used for what DejaVu lacks, where they are installed: on Linux, macOS and Windows.
_SCRIPTS = (
    "CJK|Arabic|Hebrew|Devanagari|Bengali|Gujarati|Gurmukhi|Kannada|Malayalam|Tamil|Telugu|Sinhala|Thai|Khmer|Myanmar"
    "|Ethiopic|Tibetan"
)
_MORE_FONTS = re.compile(
    rf"Noto (Sans|Serif)( ({_SCRIPTS})|$)|WenQuanYi|Source Han|IPAGothic|Droid Sans|Arial Unicode|PingFang|Hiragino"
    r"|Apple SD Gothic|Microsoft YaHei|Yu Gothic|MS Gothic|Malgun Gothic|Nirmala|Leelawadee|Unifont"
)
_FONT_FILES = re.compile(rf"Noto(Sans|Serif)({_SCRIPTS})?-Regular|wqy|SourceHan.*Regular|ipag|DroidSans|unifont", re.IGNORECASE)

_MENTIONED = set[str]()  # characters without a font, each of which is mentioned once

_STYLE: dict[Any, Any] = {
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


def styled(draw: Callable[P, F]) -> Callable[P, F]:
    """Decorate a drawing function so that it uses the common style."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> F:
        with mpl.rc_context(_style()):
            return draw(*args, **kwargs)

    return drawn


@cache
def _style() -> dict[Any, Any]:
    """The style with all installed fonts: matplotlib takes a character from the first one that has it."""
    fonts = font_manager.fontManager
    known = {font.fname for font in fonts.ttflist}
    for file in font_manager.findSystemFonts():
        if file not in known and _FONT_FILES.match(Path(file).name):  # installed after matplotlib made its list, which it keeps
            with suppress(OSError, RuntimeError):
                fonts.addfont(file)
    installed = {font.name for font in fonts.ttflist}
    return {**_STYLE, "font.family": ["DejaVu Sans", *sorted(filter(_MORE_FONTS.match, installed))]}


def rendered(figure: Figure, format_: str, *, dpi: int = _DPI) -> bytes:
    """Render the figure as "png" or "svg". A character that no installed font has is drawn as a box, and is mentioned."""
    content = io.BytesIO()
    metadata = {"Date": None, "Creator": "Vitrail"} if format_ == "svg" else {"Software": "Vitrail"}
    with mpl.rc_context(_style()), _missing_characters():
        figure.draw_without_rendering()  # fixes the layout once; otherwise PNG and SVG would differ slightly
        figure.set_layout_engine("none")
        figure.savefig(content, format=format_, dpi=dpi, bbox_inches="tight", pad_inches=0.06, metadata=metadata)
    return content.getvalue()


@contextmanager
def _missing_characters() -> Iterator[None]:
    """Replace matplotlib's warning for each character without a font by one sentence."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found: dict[str, None] = {}
    for one in caught:
        character = re.match(r"Glyph (\d+) ", str(one.message))
        if character is not None:
            found[chr(int(character[1]))] = None
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    found = {one: None for one in found if one not in _MENTIONED}
    _MENTIONED.update(found)
    if found:
        log.warning(
            "No installed font has %s, which a figure shows as boxes. Install a font for this script, such as Noto Sans.",
            " ".join(list(found)[:8]) + (" …" if len(found) > 8 else ""),
        )


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
