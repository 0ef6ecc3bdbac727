"""Curves from metrics.jsonl."""

from __future__ import annotations

import pytest

from vitrail.train.curves import _best


@pytest.mark.parametrize(
    ("headline", "values", "title"),
    [
        ("accuracy", [float("nan"), 0.5, 0.75, 0.6], ", best 0.75 at step 2"),
        ("loss", [float("nan"), 0.5, 0.75], ", best 0.5 at step 1"),
        ("loss", [float("nan")], ""),
    ],
)
def test_the_best_validation_is_a_number(headline: str, values: list[float], title: str) -> None:
    validated = [{"step": step, headline: value} for step, value in enumerate(values)]
    assert _best(validated, headline) == title
