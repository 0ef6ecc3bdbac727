"""Lengths of a part of a run: in steps, in epochs, or as a fraction of the run."""

from __future__ import annotations

import math
import re

from vitrail.errors import VitrailError, counted

Length = int | str
"""500 (steps), "10ep" (epochs) or "5%" (of the run)."""

# With an exponent, since very small and very large numbers are stored so: 1e-05%.
_WRITTEN = re.compile(r"(?P<number>(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)\s*(?P<unit>%|ep|epochs?|steps?|)")
_EXAMPLES = "a number of steps such as 500, of epochs such as 10ep, or a part of the run such as 5%"


def parsed_length(value: Length, name: str) -> Length:
    """Return a length as it is stored: an integer of steps, "10ep" or "5%". `name` is the setting it belongs to."""
    match = _WRITTEN.fullmatch(str(value).strip().lower()) if not isinstance(value, bool) else None
    if match is not None and math.isfinite(float(match["number"])):
        number, unit = float(match["number"]), match["unit"]
        if unit == "%" and number < 100:
            return f"{number:g}%" if number else 0
        if unit.startswith("ep"):
            return f"{number:g}ep" if number else 0
        if unit != "%" and number == int(number) and not isinstance(value, float):
            return int(number)
        if unit == "%" and number >= 100:
            raise VitrailError(f"{name} is {value}; a part of the run is less than 100%. It can be {_EXAMPLES}.")
    raise VitrailError(f"{name} is {value!r}; it must be {_EXAMPLES}.")


def length_in_steps(length: Length, total: int, per_epoch: float) -> int:
    """Return a stored length in optimiser steps, for a run of `total` steps with `per_epoch` in each epoch."""
    if isinstance(length, int):
        return length
    steps = total * float(length[:-1]) / 100 if length.endswith("%") else per_epoch * float(length[:-2])
    return max(1, math.floor(steps + 0.5))


def describe_length(length: Length) -> str:
    """`10ep` is `10 epochs`, `5%` is `5 % of the run`, 500 is `500 steps`."""
    if isinstance(length, int):
        return counted(length, "step")
    if length.endswith("%"):
        return f"{length[:-1]} % of the run"
    return f"{length[:-2]} epoch{'s' * (length != '1ep')}"
