"""Every symbol, test and command that the paper's map and the page on silent failures name exists."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from vitrail.cli import COMMANDS
from vitrail.recipes import RECIPES
from vitrail.study import STUDIES

PAGES = ("paper.md", "silent-failures.md", "coming-from.md", "troubleshooting.md")


def _named(page: str, pattern: str) -> list[str]:
    return sorted(set(re.findall(pattern, (ROOT / "docs" / page).read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", _named("paper.md", r"`(vitrail(?:\.\w+)+)`"))
def test_the_symbol_exists(name: str) -> None:
    resolve(name)


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_exist(page: str) -> None:
    for file, function in _named(page, r"`(tests/[\w/]+\.py)(?:::(\w+))?`"):
        path = ROOT / file
        assert path.exists(), f"{page} names {file}"
        assert not function or f"def {function}(" in path.read_text(encoding="utf-8"), f"{page} names {file}::{function}"


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_exist(page: str) -> None:
    for text in _named(page, r"`vitrail ((?!\.)[^`]+)`"):
        words = shlex.split(text)
        assert words[0] == "--help" or words[0] in COMMANDS or " ".join(words[:2]) in COMMANDS, f"{page} names `vitrail {text}`"
        if words[0] == "train" and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in RECIPES
        if words[0] == "study" and len(words) > 1:
            assert words[1] in STUDIES


def test_the_paper_is_covered() -> None:
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    tables = {number for group in re.findall(r"Tables? (\d+(?:, \d+)*)", page) for number in group.split(", ")}
    figures = {number for group in re.findall(r"Fig\. (\d+(?:, \d+)*)", page) for number in group.split(", ")}
    assert tables == {str(number) for number in range(1, 10)}
    assert figures == {str(number) for number in range(1, 15)}
    for equation in ("Eq. 1", "Eq. 2", "Eq. 3", "Eq. 4", "Eq. 5–8"):
        assert equation in page


def test_ten_silent_failures() -> None:
    rows = re.findall(r"^\| (\d+) \|.*`tests/", (ROOT / "docs" / "silent-failures.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [str(number) for number in range(1, 11)]


def resolve(name: str) -> Any:
    """Import the longest part that is a module, and take the rest as attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(_attribute, parts[end:], module)
    raise AssertionError(f"{name} is not there")


def _attribute(value: Any, name: str) -> Any:
    return value.__dataclass_fields__[name] if name in getattr(value, "__dataclass_fields__", {}) else getattr(value, name)


def test_the_files_that_contributors_are_sent_to_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|scripts|benchmarks)/[\w./-]*)`", page)
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).exists(), f"CONTRIBUTING.md names {path}"
    for file, name in (("src/vitrail/checkpoints/formats.py", "FORMATS"), ("src/vitrail/recipes/__init__.py", "_FILES")):
        assert f"{name} = " in (ROOT / file).read_text() or f"{name}:" in (ROOT / file).read_text()
