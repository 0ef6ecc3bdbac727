"""`Figure`: matplotlib's, without pyplot's global state, and shown by notebooks."""

from __future__ import annotations

from matplotlib.figure import Figure as MatplotlibFigure

from vitrail.drawing.style import rendered

_SCREEN_DPI = 90


class Figure(MatplotlibFigure):
    """A matplotlib figure that notebooks show, and that needs no display: `figure.savefig("curves.png")`."""

    def _repr_png_(self) -> bytes:
        return rendered(self, "png", dpi=_SCREEN_DPI)
