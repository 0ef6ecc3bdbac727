"""The error tour: what users do wrong, and what the error then says. `test_error_tour.py` raises each; the reference shows the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One mistake: the command or Python expression that makes it, and the parts of the message."""

    topic: str
    situation: str
    run: str
    found: str
    then: tuple[str, ...]


CASES: tuple[Case, ...] = ()
