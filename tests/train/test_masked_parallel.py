"""Learning without labels on two ranks: what one process computes, sharded or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train.masked_ranks import run_of
from tests.train.processes import run_module
from tests.train.small import train, weights
from tests.train.test_masked_runs import of_the_image
from vitrail.tasks.masked import Masked
from vitrail.train.run import RunFolder


def apart(one: Path, two: Path) -> float:
    """The largest difference between two runs' weights, those around the model included."""
    pairs = [(weights(one), weights(two)), tuple(load_file(run / "reconstruction" / "parts.safetensors") for run in (one, two))]
    return max(float((ours[name] - theirs[name]).abs().max()) for ours, theirs in pairs for name in ours)


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_module("tests.train.masked_ranks", tmp_path)
    # A rank draws what it hides for itself, so two ranks hide other patches than one; but engines agree.
    assert apart(tmp_path / "colour-ddp", tmp_path / "colour-fsdp") < 1e-5
    monkeypatch.setattr(Masked, "draw", of_the_image)
    train(run_of("mae"), tmp_path / "mae-alone")
    for engine in ("ddp", "fsdp"):
        assert apart(tmp_path / f"mae-{engine}", tmp_path / "mae-alone") < 1e-5
        ours, theirs = (RunFolder(tmp_path / name).records()[-1] for name in (f"mae-{engine}", "mae-alone"))
        for figure in ("images", "constant_loss", "relative_loss"):
            assert ours[figure] == pytest.approx(theirs[figure], abs=1e-5)
