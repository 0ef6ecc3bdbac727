"""One template for all pages: escaped, self-contained, light and dark."""

from __future__ import annotations

import re

import pytest

from vitrail.drawing.page import (
    Block,
    Commands,
    Finding,
    Findings,
    Headline,
    Info,
    LinkedFigure,
    Notes,
    Page,
    PageSection,
    Paragraph,
    Plot,
    Strip,
    Table,
)

HOSTILE = "<script>alert(1)</script>\x1b[31m\"'&"
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (300).to_bytes(4, "big") + b"\0" * 9
ONE_OF_EACH: list[Block] = [
    Paragraph(HOSTILE),
    Info({HOSTILE: HOSTILE}),
    Notes([HOSTILE]),
    Table([HOSTILE], [[HOSTILE], [1234], [0.5], [float("nan")]]),
    Plot(PNG, HOSTILE, HOSTILE),
    LinkedFigure(HOSTILE, HOSTILE, HOSTILE, HOSTILE, ["png"], HOSTILE),
    Strip(HOSTILE, HOSTILE, HOSTILE, [("", HOSTILE)]),
    Findings([Finding(HOSTILE, "no", HOSTILE, HOSTILE, HOSTILE, HOSTILE)]),
    Commands([HOSTILE]),
]


def page(*blocks: Block) -> str:
    section = PageSection(HOSTILE, blocks, HOSTILE, HOSTILE, HOSTILE)
    warned = {"warnings": [HOSTILE], "notes": [HOSTILE], "bad_images": [HOSTILE, HOSTILE]}
    found = [Finding(HOSTILE, "yes", HOSTILE)]
    headline = Headline(HOSTILE, HOSTILE, HOSTILE)
    links, info = [(HOSTILE, HOSTILE)], {HOSTILE: HOSTILE}
    return Page(HOSTILE, [section], HOSTILE, HOSTILE, links, headline, info, overview=found, **warned).html()


def test_every_block_has_its_part_of_the_template() -> None:
    assert {type(block) for block in ONE_OF_EACH} == set(Block.__subclasses__())
    empty = len(page())
    assert all(len(page(block)) > empty + 20 for block in ONE_OF_EACH)


def test_nothing_is_left_unescaped() -> None:
    html = page(*ONE_OF_EACH)
    assert "<script>" not in html and "\x1b" not in html and "alert(1)" in html
    assert not re.search(r"=\"[^\"]*[<>][^\"]*\"", html), "no attribute is left open"


def test_a_page_is_self_contained_and_has_a_dark_mode() -> None:
    html = page(*ONE_OF_EACH)
    assert "prefers-color-scheme: dark" in html and "color-scheme: light dark" in html
    assert not re.search(r"https?:|<link|@import|url\(", html)
    assert "1,234" in html and "0.500" in html and "–" in html and 'width="200"' in html


@pytest.mark.parametrize("sortable", [False, True])
def test_only_sortable_tables_need_a_script(sortable: bool) -> None:
    assert ("<script>" in page(Table(["a"], [[1]], sortable=sortable))) == sortable
