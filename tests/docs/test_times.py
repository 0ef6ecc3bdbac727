"""Every guide says how long it takes."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT

EXEMPT = {"silent-failures.md"}  # a table of guards, not a guide


def test_every_guide_says_how_long_it_takes() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    guides = re.search(r"- Guides:\n((?:      - .*\n)+)", navigation)
    assert guides
    pages = [line.strip("- ").strip() for line in guides[1].splitlines()] + ["studies.md", "coming-from.md"]
    assert len(pages) > 15
    for page in pages:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert page in EXEMPT or re.search(r"^\*\*Time\*\*: ", text, re.MULTILINE), f"docs/{page} does not say how long it takes"
    for page, words in (("start.md", "**10 minutes**"), ("tour.md", "Reading time: 5 minutes")):
        assert words in (ROOT / "docs" / page).read_text(encoding="utf-8")
