"""Curves from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitrail.train.curves import _best, draw_curves
from vitrail.train.run import RunFolder


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


def test_records_without_numbers_are_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.add({"kind": "train", "step": 2, "loss": 1.0, "lr": 0.1, "speed": {"seconds": 1.5}})
    run.add({"kind": "train", "step": 4, "lost": 1.0, "lr": "0.1", "speed": {"seconds": 10**400}})
    run.add({"kind": "train", "step": 10**30, "speed": 3})
    run.add({"kind": "train", "step": 6, "loss": 1e308, "lr": -1e308})
    run.add({"kind": "val", "step": 4, "accuracx": 0.5, "loss": None})
    assert draw_curves(run, headline="accuracy")
    assert run.seconds() == 1.5
