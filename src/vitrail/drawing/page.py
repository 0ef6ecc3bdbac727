"""Build HTML pages: a report is a `Page` of sections of blocks, and one template renders all of them.

A page needs no other file, except the figures that an inspection links to. Values are escaped by the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.notebook import png_uri
from vitrail.text import printable

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Block:
    """A part of a section; the template has a macro for each kind."""

    @property
    def kind(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Paragraph(Block):
    text: str
    faint: bool = False


@dataclass(frozen=True)
class Info(Block):
    """Names and values."""

    values: Mapping[str, str]


@dataclass(frozen=True)
class Notes(Block):
    """A list that stands out from the text."""

    notes: Sequence[str]


@dataclass(frozen=True)
class Table(Block):
    """Rows of text or numbers. A sortable table is sorted by a click on its heading."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    sortable: bool = False


@dataclass(frozen=True)
class Plot(Block):
    """A figure as PNG, inside the page."""

    png: bytes
    alt: str
    caption: str = ""

    @property
    def uri(self) -> str:
        return png_uri(self.png)

    @property
    def width(self) -> int:
        """The displayed width: two thirds of the pixels are sharp on high-resolution screens, with text of the page's size."""
        return round(int.from_bytes(self.png[16:20], "big") / 1.5)


@dataclass(frozen=True)
class LinkedFigure(Block):
    """A figure in a file next to the page, with links to its other formats."""

    anchor: str
    heading: str
    caption: str
    stem: str
    extensions: Sequence[str]
    badge: str = ""
    in_paper: bool = False


@dataclass(frozen=True)
class Strip(Block):
    """A row of thumbnails (data URI or nothing, caption) of one kind of error."""

    true: str
    predicted: str
    text: str
    examples: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Finding:
    """A statement of the paper, and what came out here."""

    claim: str
    verdict: str
    """yes, partly, no or unclear"""
    label: str
    paper: str = ""
    ours: str = ""
    why: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Findings(Block):
    findings: Sequence[Finding]


@dataclass(frozen=True)
class Commands(Block):
    lines: Sequence[str]


@dataclass(frozen=True)
class PageSection:
    """A heading and what is below it."""

    title: str
    blocks: Sequence[Block]
    anchor: str = ""
    badge: str = ""
    file: str = ""
    """A file in the same folder with the same content."""


@dataclass(frozen=True)
class Headline:
    """The most important number of a page."""

    value: str
    name: str
    detail: str


@dataclass(frozen=True)
class Page:
    """Everything that a page shows."""

    title: str
    sections: Sequence[PageSection]
    footer: str
    intro: str = ""
    links: Sequence[tuple[str, str]] = ()
    """(anchor, text) of the navigation."""
    headline: Headline | None = None
    info: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    bad_images: Sequence[str] = ()
    overview: Sequence[Finding] = ()

    def html(self) -> str:
        """Render the page. Control characters of names are escaped, so that the file is valid UTF-8."""
        style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
        blocks = [block for section in self.sections for block in section.blocks]
        sortable = any(isinstance(block, Table) and block.sortable for block in blocks)
        return printable(_template().render(page=self, style=style, sortable=sortable))


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.tests["number"] = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    environment.filters["number"] = _number
    environment.filters["sort_value"] = lambda value: -1 if value != value else value
    return environment.get_template("page.html.jinja")


def _number(value: float) -> str:
    """Format a cell: 1,234 or 0.123; a dash for NaN."""
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if value != value else f"{value:.3f}"
