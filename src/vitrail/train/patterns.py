"""Patterns on the names of parameters, as the optimiser's settings have them: see `parameter_groups`."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from vitrail.train.config import OptimSpec


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a pattern as a regular expression over whole names; one that is not valid is refused."""
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise VitrailError(f"{pattern!r} is not a valid regular expression: {error}.") from error


def split_rule(rule: str, setting: str) -> tuple[str, float]:
    """Return the pattern and the number of PATTERN=NUMBER."""
    pattern, equals, number = rule.rpartition("=")
    try:
        return pattern, float(number if equals and pattern else "")
    except ValueError as error:
        raise VitrailError(f"{setting} has {rule!r}; it must be PATTERN=NUMBER, such as 'head=10'.") from error


def check_patterns(spec: OptimSpec) -> None:
    """Refuse patterns and numbers that cannot be meant, before there is a model."""
    for pattern in spec.freeze:
        compile_pattern(pattern.removeprefix("!"))
    for rule in spec.lr_scale:
        pattern, scale = split_rule(rule, "optim.lr_scale")
        compile_pattern(pattern)
        if not 0 < scale < float("inf"):
            raise VitrailError(f"optim.lr_scale has {rule!r}; the factor must be above 0. To freeze parameters, use optim.freeze.")
    for rule in spec.weight_decay_for:
        pattern, decay = split_rule(rule, "optim.weight_decay_for")
        compile_pattern(pattern)
        if not 0 <= decay < float("inf"):
            raise VitrailError(f"optim.weight_decay_for has {rule!r}; weight decay must be 0 or more.")
