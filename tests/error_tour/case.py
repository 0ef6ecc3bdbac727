"""One row of the error tour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
