"""Two or three processes compute what one computes, by every engine, and can take over from each other."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.ranks import ADAM, distilling, run_of
from tests.train.small import weights
from vitrail.train.loop import train
from vitrail.train.run import RunFolder

ROOT = Path(__file__).parents[2]


def launch(ranks: int, what: str, out: Path) -> None:
    """As torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **common, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.train.ranks", what, str(out)]
    started = [
        subprocess.Popen(command, cwd=ROOT, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(400) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parallel")
    train(run_of(steps=3), out / "teacher")
    launch(2, "begin", out)
    for engine in ("ddp", "fsdp"):
        for ranks in (1, 3):
            shutil.copytree(out / f"cut-{engine}", out / f"cut-{engine}-{ranks}")
    launch(3, "go_on", out)
    train(run_of(), out / "alone")
    return out


def close(one: Path, two: Path) -> float:
    """The largest difference between two runs' weights."""
    ours, theirs = weights(one), weights(two)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "hybrid"])
def test_two_ranks_are_one(engine: str, runs: Path) -> None:
    assert close(runs / engine, runs / "alone") < 1e-5
    ours, theirs = ([one["loss"] for one in RunFolder(runs / name).records() if one["kind"] == "val"] for name in (engine, "alone"))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert RunFolder(runs / engine).records()[-1]["images"] == RunFolder(runs / "alone").records()[-1]["images"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_run_of_two_ranks_goes_on_with_three(engine: str, runs: Path) -> None:
    assert close(runs / f"cut-{engine}-3", runs / "alone") < 1e-5


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_run_of_two_ranks_goes_on_with_one(engine: str, runs: Path) -> None:
    train(run_of(), runs / f"cut-{engine}-1")
    assert close(runs / f"cut-{engine}-1", runs / "alone") < 1e-5
    steps = [one["step"] for one in RunFolder(runs / f"cut-{engine}-1").records() if one["kind"] == "train"]
    assert steps == [2, 4, 5]


def test_adam_under_sharding(runs: Path) -> None:
    train(run_of(**ADAM), runs / "alone-adam")
    assert close(runs / "fsdp-adam", runs / "alone-adam") < 1e-5


def test_two_heads_under_sharding(runs: Path) -> None:
    train(distilling(runs), runs / "distilled-alone")
    assert close(runs / "distilled", runs / "distilled-alone") < 1e-5
    assert not torch.equal(*(weights(runs / "distilled")[f"{head}.weight"] for head in ("head", "distill_head")))
