"""docs/evidence.md lists every file of results, and what it names exists."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def test_every_file_of_results_is_listed() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*.csv"))
    missing = [file.name for file in files if f"results/{file.name})" not in PAGE]
    assert files and not missing, f"add {missing} to docs/evidence.md"


def test_the_scripts_exist() -> None:
    named = set(re.findall(r"`python (?:-m )?(benchmarks[/.]\w+)", PAGE))
    assert len(named) > 12
    for one in named:
        assert (ROOT / f"{one.removesuffix('.py').replace('.', '/')}.py").exists(), one


def test_every_row_has_a_record_or_says_that_it_has_none() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| figure", "|---"))]
    assert len(rows) > 30
    for row in rows:
        assert "](" in row or "not recorded" in row, row
