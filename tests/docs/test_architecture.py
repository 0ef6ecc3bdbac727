"""The tables of files in docs/architecture.md and docs/fused-encoder.md name every file, and no other.

What the page on architecture names besides exists, too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.test_named_things import resolve

PACKAGE = ROOT / "src" / "vitrail"


def _table(page: str, heading: str, section: str = "") -> str:
    """Return the rows of a section's table whose first column has this heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n{section}")[2]
    rows = text.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return rows.split("\n", 2)[2]


def _named(rows: str) -> list[str]:
    """Return the files and folders that first columns name."""
    return sorted(name for row in rows.splitlines() for name in re.findall(r"`([\w.]+/?)`", row.split(" | ")[0]))


def _found(folder: Path) -> list[str]:
    """Return a package's modules, and its folders with a slash."""
    modules = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
    return sorted([*modules, *(f"{path.name}/" for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__")])


def test_every_package_is_named() -> None:
    assert _named(_table("architecture.md", "package")) == _found(PACKAGE)


@pytest.mark.parametrize("package", ["models", "train", "serve"])
def test_every_file_of_a_package_with_a_table_is_named_in_it(package: str) -> None:
    assert _named(_table("architecture.md", "file", f"## {package}/")) == _found(PACKAGE / package)


def test_every_file_of_copies_for_inference_is_named() -> None:
    [row] = [row for row in _table("architecture.md", "file", "## models/").splitlines() if row.startswith("| `inference/` |")]
    assert sorted(re.findall(r"`(\w+\.py)`", row)) == _found(PACKAGE / "models" / "inference")


def test_every_file_of_the_fused_encoder_is_named() -> None:
    assert _named(_table("fused-encoder.md", "file in `models/fused/`")) == _found(PACKAGE / "models" / "fused")


def test_functions_and_files_in_the_text_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
    functions = set(re.findall(rf"`((?:{packages})\.(?!py)\w+(?:\.\w+)*)[`(]", text))
    files = set(re.findall(r"[`(](\w+/\w+\.py)[`)]", text))
    assert len(functions) >= 6 and len(files) >= 4
    for name in functions:
        resolve(f"vitrail.{name}")
    for name in files:
        assert (PACKAGE / name).exists() or (PACKAGE / "models" / name).exists(), name
