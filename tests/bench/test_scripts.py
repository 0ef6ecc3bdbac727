"""Benchmarks that drive the training loop by hand: their tiny form still runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["parallel.py", "--only", "loop", "ddp", "own"],
        ["self_supervision.py", "--cost"],
        ["train_loop.py"],
        ["small_images.py", "--rows", "s8-mae", "ti8", "--out", "OUT"],
    ],
)
def test_a_benchmark_of_training_runs(words: list[str], tmp_path: Path) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    command = [sys.executable, str(FOLDER / words[0]), *words[1:], "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
