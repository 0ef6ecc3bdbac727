"""The search for a learning rate."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.train.small import small
from vitrail.train import sweep
from vitrail.train.result import Result
from vitrail.train.sweep import best_rate


def test_a_learning_rate_that_diverges_does_not_end_the_search(tmp_path: Path) -> None:
    said: list[str] = []
    assert best_rate(small(lr_grid=(1e30, 2e-3)), tmp_path, say=said.append).optim.lr == 2e-3
    assert said[0].startswith("learning rate 1e+30 diverged: A loss or gradient was not finite in step 2")


@pytest.mark.parametrize("order", [(0.1, 0.01, 0.001), (0.001, 0.1, 0.01)])
def test_a_metric_that_is_not_a_number_is_never_the_best(
    order: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {0.1: math.nan, 0.01: 0.5, 0.001: 0.7}
    monkeypatch.setattr(sweep, "train", lambda recipe, *_, **__: Result(tmp_path, 1, "mae", {"mae": losses[recipe.optim.lr]}))
    assert best_rate(small(lr_grid=order), tmp_path, say=print).optim.lr == 0.01
