"""Parts of results that notebooks show: small HTML tables and images, and pandas tables."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from vitrail.errors import VitrailError, counted
from vitrail.text import has_surrogates, printable

_MAX_ROWS = 20
_PATH = 48  # characters


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def in_notebook() -> bool:
    """Whether this code runs in a Jupyter notebook, where results can be shown as HTML and updated."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def html_text(value: Any) -> str:
    """Escape a value for HTML; numbers get four digits."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return escape(printable(str(value)))


def html_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, limit: int = _MAX_ROWS) -> Markup:
    """Return the first `limit` rows as a table, with a line that counts the rest."""
    head = "".join(f"<th style='text-align:left'>{html_text(name)}</th>" for name in headings)
    lines = (
        "".join(f"<td style='text-align:left;vertical-align:middle'>{html_text(cell)}</td>" for cell in row) for row in rows[:limit]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = f"<p>and {counted(len(rows) - limit, 'more row')}</p>" if len(rows) > limit else ""
    return Markup(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}")


def html_image(png: bytes, alt: str) -> Markup:
    """Return an image that contains its own data."""
    return Markup(f"<img src='{png_uri(png)}' alt='{html_text(alt)}'>")


def png_uri(png: bytes) -> str:
    """Return a PNG as the address of an image in an HTML page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def html_lines(lines: Iterable[str]) -> Markup:
    """Return paragraphs, one per line."""
    return Markup("".join(f"<p>{html_text(line)}</p>" for line in lines))


def data_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a pandas DataFrame; a sentence where pandas is missing."""
    try:
        import pandas
    except ImportError as error:
        raise VitrailError("to_pandas() needs pandas, which is not installed: pip install pandas.") from error
    # Columns of text are UTF-8 in newer versions of pandas; a file name that is not keeps its bytes in a column of objects.
    plain = {name: pandas.Series(values, dtype=object) if _any_surrogates(values) else values for name, values in columns.items()}
    return pandas.DataFrame(plain)


def _any_surrogates(values: Sequence[Any]) -> bool:
    return any(isinstance(one, str) and has_surrogates(one) for one in values)


def short_path(path: str) -> str:
    """Shorten a long path to its end, for tables."""
    return path if len(path) <= _PATH else f"…{path[-_PATH:]}"
