"""Build the HTML page of an inspection. It links to files in the same folder by relative paths and needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitrail.drawing.page import Block, Info, LinkedFigure, Notes, Page, PageSection

if TYPE_CHECKING:
    from vitrail.inspect.report import Panel, Section

NOT_IN_PAPER = "not in the paper"


def page(sections: Sequence[Section], about: Mapping[str, Any]) -> str:
    """Build the whole page."""
    links = [(_anchor(section, panel), panel.heading) for section in sections[:1] for panel in section.panels]
    if len(sections) > 1:
        links = [(section.folder, section.title) for section in sections]
    return Page(
        title=f"Inspection of {' · '.join(about['titles'])}",
        links=links,
        sections=[_section(section) for section in sections],
        footer=f"Made with Vitrail {about['version']}. Every figure is available as PNG and SVG, and its data as NPZ.",
    ).html()


def _section(section: Section) -> PageSection:
    notes = [Notes(section.notes)] if section.notes else []
    figures = [_figure(section, panel) for panel in section.panels]
    blocks: list[Block] = [Info(section.info), *notes, *figures]
    return PageSection(section.title, blocks, anchor=section.folder)


def _figure(section: Section, panel: Panel) -> LinkedFigure:
    return LinkedFigure(
        anchor=_anchor(section, panel),
        heading=panel.heading,
        caption=panel.caption,
        stem=f"{section.folder}/{panel.name}".removeprefix("./"),
        extensions=["png", "svg", "npz", *(["csv"] if panel.table is not None else [])],
        badge=panel.badge,
        in_paper=panel.badge != NOT_IN_PAPER,
    )


def _anchor(section: Section, panel: Panel) -> str:
    return f"{section.folder}-{panel.name}".removeprefix(".-")
