"""The public names are those that the documentation lists, with the signatures that were written down."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import vitrail
from tests.api import surface

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_names_and_signatures_change_only_on_purpose() -> None:
    written, now = surface.FILE.read_text(encoding="utf-8").splitlines(), surface.lines()
    changes = [line for line in difflib.unified_diff(written, now, "written down", "now", lineterm="", n=0) if line[0] in "+-"]
    assert not changes, (
        "the public names changed. If that is meant: python -m tests.api.surface, and docs/python.md and CHANGELOG.md say it.\n"
        + "\n".join(changes)
    )


def test_the_documentation_lists_every_public_name_and_no_other() -> None:
    rows = dict(re.findall(r"^\| `(vitrail[\w.]*)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert tuple(rows) == surface.PACKAGES
    for package, text in rows.items():
        names = set(re.findall(r"`(\w+)`", text))
        assert names == set(surface.public_names(package)), package


def test_public_names_are_found_by_dir_and_help() -> None:
    for package in surface.PACKAGES:
        module = sys.modules[package]
        assert set(surface.public_names(package)) <= set(dir(module)), package
        for name in surface.public_names(package):
            value = getattr(module, name)
            if callable(value) and getattr(value, "__module__", "").startswith("vitrail"):
                assert value.__doc__, f"{package}.{name} has no docstring"
    assert vitrail.load.__doc__ is not None and "ViT-B/16" in vitrail.load.__doc__


def test_functions_do_not_hide_packages() -> None:
    """`vitrail.evaluate` stays the package, whatever was imported before."""
    kinds = {name: type(getattr(vitrail, name)).__name__ for name in "evaluate inspect train finetune load models".split()}
    assert kinds == dict.fromkeys("evaluate inspect train models".split(), "module") | {"finetune": "function", "load": "function"}
