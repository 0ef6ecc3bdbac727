"""One row of the error tour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Case:
    """One mistake: the command, Python expression or function that makes it, and the parts of the message."""

    topic: str
    situation: str
    run: str | Callable[[], object]
    """A command (`vitrail …`), an expression with `vitrail` and `torch`, or a function; called in the folder of `files.py`."""
    found: str
    then: tuple[str, ...]
    """What was expected, and what to do next."""
    at: str = ""
    """The place in the code where this error is made, as `raise_sites.py` names it: `data/split.py:split_rows#2`."""
    status: int = 2
    """Exit status of the command: 1 if it did its work and found problems."""
    hidden: str = ""
    """A package that is made to look not installed."""
    patch: Callable[[pytest.MonkeyPatch], object] | None = None
    """What is changed before, for errors that need a full disk, a GPU or another system."""


def at(
    site: str,
    run: str | Callable[[], object],
    found: str,
    *then: str,
    status: int = 2,
    hidden: str = "",
    patch: Callable[[pytest.MonkeyPatch], object] | None = None,
) -> Case:
    """Return the row of one place in the code, for the tables by package."""
    return Case("", "", run, found, then, at=site, status=status, hidden=hidden, patch=patch)
