"""What settings and commands can choose about data. It needs neither numpy nor torch, so that `--help` answers at once."""

from __future__ import annotations

import re
from typing import Literal

from vitrail.errors import VitrailError

BadImages = Literal["error", "skip"]
Duplicates = Literal["near", "exact", "none"]
Store = Literal["arrays", "encoded"]
Fit = Literal["crop", "stretch"]

BY_NAME = "names"
"""The rule by which new runs hold out images. `seed-N` is that of older versions, in which the seed N of a run decided."""


def rule_words(rule: str) -> str:
    """Return how a rule chooses, in words."""
    return "by a hash of file names" if rule == BY_NAME else f"at random with seed {rule.removeprefix('seed-')}"


def check_rule(rule: str, setting: str = "data.split_rule") -> None:
    """Refuse a rule that does not exist."""
    if rule != BY_NAME and not re.fullmatch(r"seed-[0-9]+", rule):
        raise VitrailError(f"{setting} is {rule!r}; it can be {BY_NAME}, or seed-N for a run of an older version with seed N.")
