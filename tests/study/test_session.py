"""Whole studies, as short as they can be: what is finished is never run again, killed or shared between processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import vitrail.study.run as running
from vitrail.errors import VitrailError
from vitrail.study.definitions import STUDIES
from vitrail.study.report import summaries
from vitrail.study.rows import DONE, FAILED, Results
from vitrail.study.session import run_study
from vitrail.study.settings import StudySettings

SHORT: dict[str, Any] = {"epochs": 0.3, "finetune_epochs": 0.2, "jobs": 1, "device": "cpu", "shots": 2}


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with two steps only."""
    monkeypatch.setattr(running, "_PROBE_STEPS", {"cpu": 2})


@pytest.mark.slow
def test_a_study_from_beginning_to_end_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    result = run_study("positions", StudySettings(out=tmp_path, **SHORT), say=said.append)
    rows = Results(result.csv).read()
    assert [row.status for row in rows] == [DONE] * 5 and result.late == 0
    for row in rows:
        assert 0 <= (row.few_shot or -1) <= 1 and 0 <= (row.finetuned or -1) <= 1
        assert row.pretrain_flops and row.parameters and row.hardware and row.torch and row.pretrain_recipe and row.seconds
        assert str(tmp_path) not in row.finetune_recipe
        assert row.first_layer_distance is not None and (row.neighbour_similarity is None) == (row.label in ("none", "relative"))
    assert any("planned: 5 rows" in line for line in said)
    assert {file.suffix for file in result.files} == {".png", ".svg", ".md", ".html"}
    assert not list((tmp_path / "positions" / "runs").glob("*/model"))  # deleted when the rows are written
    monkeypatch.setattr(running, "train", lambda *_, **__: pytest.fail("it was trained again"))
    content = result.csv.read_bytes()
    run_study("positions", StudySettings(out=tmp_path, **SHORT), say=said.append)
    assert result.csv.read_bytes() == content and said[-1] == "all 5 rows of positions are finished"
    with pytest.raises(VitrailError, match="other settings: shots 2 → 3"):
        run_study("positions", StudySettings(out=tmp_path, **{**SHORT, "shots": 3}))


@pytest.mark.slow
def test_a_run_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = running.train
    broken = True

    def fails(recipe: Any, *arguments: Any, **more: Any) -> Any:
        if broken and recipe.task.kind == "masked-patch" and recipe.steps > 2:
            raise VitrailError("The loss is not finite.\nLower the rate.")
        return train(recipe, *arguments, **more)

    monkeypatch.setattr(running, "train", fails)
    settings = StudySettings(out=tmp_path, **SHORT)
    file = run_study("self-supervision", settings).csv
    found = {row.label: row.status for row in Results(file).read()}
    assert found.pop("masked patches") == FAILED and set(found.values()) == {DONE}
    assert "Failed: ViT masked patches, seed 0: The loss is not finite. Lower the rate." in file.with_suffix(".md").read_text()
    broken = False
    run_study("self-supervision", settings)
    assert FAILED in {row.status for row in Results(file).read()}  # only on request
    run_study("self-supervision", StudySettings(out=tmp_path, retry_failed=True, **SHORT))
    assert {row.status for row in Results(file).read()} == {DONE}


@pytest.mark.slow
def test_failed_fine_tuning_is_run_again_without_the_pre_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, trained, broken = running.train, list[str](), True

    def fails(recipe: Any, out: Path, **more: Any) -> Any:
        if "vitrail-study-" not in str(out):  # not to measure the speed
            if broken and recipe.name == "finetune" and recipe.model.image_size == 32:
                raise VitrailError("The loss is not finite.")
            trained.append(recipe.name)
        result = train(recipe, out, **more)
        if result.before:
            trained.pop()
        return result

    monkeypatch.setattr(running, "train", fails)
    real, settings = time.time, StudySettings(out=tmp_path, budget=30.0, **SHORT)
    with monkeypatch.context() as context:  # the time is over after the row that fails, and before the last one of the three
        context.setattr(
            running.time, "time", lambda: real() + (3600 if len(Results(tmp_path / "resolution.csv").finished()) > 1 else 0)
        )
        assert run_study("resolution", settings).late == 7
    rows = Results(run_study("resolution", settings).csv).read()
    assert [row.status for row in rows if row.series == "ViT"] == [DONE, DONE, FAILED]
    broken = False
    trained.clear()
    rows = Results(run_study("resolution", dataclasses.replace(settings, retry_failed=True)).csv).read()
    assert {row.status for row in rows} == {DONE} and trained == ["finetune"] * 3
    assert not list((tmp_path / "resolution" / "runs").glob("*/model"))


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        "-m",
        "vitrail",
        "study",
        "self-supervision",
        "--epochs",
        "2",
        "--finetune-epochs",
        "1",
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*words, "--out", str(out), *options], stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_a_killed_study_is_finished_by_two_processes_without_doing_anything_twice(tmp_path: Path) -> None:
    file = tmp_path / "self-supervision.csv"
    first = start(tmp_path, "--jobs", "1")
    while not file.exists() or not Results(file).finished():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = {row.key: row for row in Results(file).read()}
    assert 1 <= len(before) < 4
    processes = [start(tmp_path, "--jobs", jobs) for jobs in ("1", "2")]
    said = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    rows = {row.key: row for row in Results(file).read()}
    assert len(rows) == 4 and {row.status for row in rows.values()} == {DONE}
    assert all(rows[key] == row for key, row in before.items())
    trained = [line for text in said for line in text.splitlines() if line.startswith("[")]
    assert len(trained) == 4 - len(before), trained


@pytest.mark.slow
def test_under_torchrun_all_ranks_train_each_row(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "vitrail",
        "study",
        "resolution",
    ]
    words += ["--epochs", "0.3", "--finetune-epochs", "0.2", "--device", "cpu", "--out", str(tmp_path), "--ladder", "tiny"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = Results(tmp_path / "resolution.csv").read()
    assert len(rows) == 9 and {(row.status, row.ranks) for row in rows} == {(DONE, 2)}
    assert sum(line.startswith("[9/9]") for line in done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_budget_that_is_over_leaves_rows_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    settings = StudySettings(out=tmp_path, budget=30.0, **SHORT)
    real = time.time
    with monkeypatch.context() as context:
        context.setattr(running.time, "time", lambda: real() + (3600 if Results(tmp_path / "positions.csv").finished() else 0))
        result = run_study("positions", settings, say=said.append)
    assert result.late == 4 and "4 rows were not started. Run the same command again" in said[-1]
    assert len(Results(result.csv).finished()) == 1
    assert "the budget was over before they started" in result.csv.with_suffix(".md").read_text()
    assert run_study("positions", settings).late == 0
    assert len(summaries(tmp_path)[0].entries) == 5


@pytest.mark.slow
def test_no_row_starts_after_the_budget_where_rows_share_their_pre_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    settings = StudySettings(out=tmp_path, budget=30.0, **SHORT)
    with monkeypatch.context() as context:
        context.setattr(running.time, "time", lambda: real() + (3600 if Results(tmp_path / "resolution.csv").finished() else 0))
        assert run_study("resolution", settings).late == 8
    assert run_study("resolution", settings).late == 0
    assert {row.status for row in Results(tmp_path / "resolution.csv").read()} == {DONE}
    assert not list((tmp_path / "resolution" / "runs").glob("*/model"))


def test_jobs_and_torchrun_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(VitrailError, match="use --jobs 1"):
        run_study("positions", StudySettings(out=tmp_path, **{**SHORT, "jobs": 2}))


def test_targets_must_be_classes(tmp_path: Path) -> None:
    table = tmp_path / "numbers.csv"
    table.write_text("path,target\na.png,1.5\nb.png,2.5\n")
    assert STUDIES
    with pytest.raises(VitrailError):
        run_study("positions", StudySettings(out=tmp_path, target=f"csv:{table}", **SHORT))


def test_measuring_the_speed_does_not_use_up_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it took half of two minutes, and no row fitted into the rest."""
    from vitrail.study import session

    monkeypatch.setattr(session.time, "time", lambda: 1000.0)
    assert session._left(2, began=990.0) == 110
    assert session._left(2, began=900.0) == session._left(2, began=0.0) == 90
