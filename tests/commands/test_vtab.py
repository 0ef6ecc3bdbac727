"""`vitrail vtab`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.test_eval import run
from tests.evaluate.conftest import checkpoint, photos  # noqa: F401 - fixtures
from tests.evaluate.test_suites import TASKS, eurosat, small_draws  # noqa: F401


def test_lists_available_and_missing_tasks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    eurosat(TASKS["eurosat"], tmp_path)
    status, out, _ = run(capsys, "vtab", "--root", tmp_path)
    assert status == 0 and "tasks with data: 1 of 19" in out and "Pets was not found: put it in" in out
    status, out, _ = run(capsys, "vtab", "--root", tmp_path, "--suite", "transfer", "--json")
    assert status == 0 and len(json.loads(out)["missing"]) == 5
    status, _, err = run(capsys, "vtab", "b.npz", "--root", tmp_path, "--tasks", "structured")
    assert status == 2 and "None of the tasks (8)" in err
    status, _, err = run(capsys, "vtab", "--source", "eurosat")
    assert status == 2 and "not NAME=SOURCE" in err


@pytest.mark.slow
def test_runs_the_available_tasks(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    eurosat(TASKS["eurosat"], tmp_path)
    protocol = (
        "--steps",
        "2",
        "--warmup",
        "0",
        "--image-size",
        "32",
        "--batch",
        "4",
        "--device",
        "cpu",
        "--workers",
        "0",
        "--seeds",
        "1",
    )
    status, out, _ = run(
        capsys, "vtab", checkpoint, "--root", tmp_path, "--out", tmp_path / "runs", "--tasks", "specialized", *protocol
    )
    assert status == 0 and "specialized:" in out and "3 tasks without data" in out
    assert json.loads((tmp_path / "runs" / "results.json").read_text())["scores"][0]["task"] == "eurosat"
