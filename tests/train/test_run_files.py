"""The files of a run, changed by hand or by a failing disk: a sentence, or a line that is left out with a warning."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.small import small
from vitrail.errors import VitrailError
from vitrail.train.result import finished
from vitrail.train.run import RunFolder
from vitrail.train.saved_model import SavedModel

MODEL = {"checkpoint": "best", "step": 4, "steps_taken": 6, "weights": "raw", "metric": "accuracy", "value": 1}
END = {"kind": "end", "step": 6, "headline": "accuracy", "seconds": 1.5, "stopped_early": False, "model": MODEL, "accuracy": 0.5}


def run_with(folder: Path, end: Any) -> RunFolder:
    (folder / "model").mkdir(parents=True)
    lines = [json.dumps({"kind": "train", "step": 6, "loss": 1.0}), end if isinstance(end, str) else json.dumps(end)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return RunFolder(folder)


def test_the_end_of_a_run_is_read(tmp_path: Path) -> None:
    run = run_with(tmp_path, {**END, "note": "a word"})
    end = run.end()
    assert end is not None
    result = finished(run, end)
    assert result.metrics == {"accuracy": 0.5} and result.model == SavedModel(**MODEL)  # type: ignore[arg-type]
    assert "of step 4 of 6" in result.model.describe()


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": ...},
        {"seconds": "1"},
        {"seconds": float("inf")},
        {"headline": ...},
        {"headline": []},
        {"model": []},
        {"model": None},
        {"model": {**MODEL, "other": 1}},
        {"model": {**MODEL, "step": "4"}},
        {"model": {**MODEL, "step": True}},
        {"model": {**MODEL, "value": 10**400}},
        {"model": {**MODEL, "value": []}},
        {"model": {"step": 4}},
    ],
    ids=str,
)
def test_an_end_that_is_not_one_is_a_bad_line(change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = {name: value for name, value in {**END, **change}.items() if value is not ...}
    run = run_with(tmp_path, record)
    assert run.end() is None
    assert "Line 2 of" in caplog.text and len(run.records()) == 1


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_deeply_nested_line_is_a_bad_line(depth: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_with(tmp_path, '{"kind": "end", "step": 6, "x": ' + "[" * depth + "]" * depth + "}")
    assert run.end() is None and "Line 2 of" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": []},
        {"recipe": {"data": "x"}},
        {"recipe": {"data": {}, "model": []}},
        {"recipe": {"data": [1]}},
        {"recipe": {"optim": {"lr_scale": [1.5]}}},
        {"recipe": {"data": {"source": 3}}},
        {"recipe": {"ema": "x"}},
        {"recipe": {"batch": True}},
        {"recipe": [1, "x"]},
        {"resolved": []},
        {"resolved": {"trained_on": 5}},
        {"resolved": {"trained_on": [5]}},
        {"format": 1, "recipe": {"optim": []}},
        {"format": []},
    ],
    ids=str,
)
def test_a_config_that_is_not_one_is_a_sentence(change: dict[str, Any], tmp_path: Path) -> None:
    config = {"format": 3, "recipe": small().to_dict(), "resolved": {"precision": "fp32"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    run = RunFolder(tmp_path)
    with pytest.raises(VitrailError, match=r"config\.json is not a run's configuration"):
        run.saved_recipe()
        run.saved_precision()
        run.saved_images()


def test_a_run_without_its_config_is_resumed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert RunFolder(tmp_path / "new").check_unchanged(small()) == {} and not caplog.text
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert RunFolder(tmp_path).check_unchanged(small()) == {}
    assert "a run without config.json: it is not known whether it began with these settings" in caplog.text


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_deeply_nested_config_is_a_sentence(depth: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"recipe": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(VitrailError, match="nested too deeply"):
        RunFolder(tmp_path).saved_recipe()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_fifos_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(VitrailError, match="a FIFO"):
        RunFolder(tmp_path).saved_recipe()
    with pytest.raises(VitrailError, match="a FIFO"):
        RunFolder(tmp_path).records()


def test_a_model_that_was_being_replaced_is_restored(tmp_path: Path) -> None:
    run = run_with(tmp_path, END)
    (tmp_path / "model").rename(tmp_path / ".model.0123abcd.old")
    run.hold()
    assert run.end() is not None
    run.release()


def test_a_folder_in_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "new")
    run.hold()
    run.release()
    assert not (tmp_path / "new").exists()
    run = RunFolder(tmp_path / "runs" / "new")
    run.hold()
    run.release()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "old").mkdir()
    run = RunFolder(tmp_path / "old")
    run.hold()
    run.release()
    assert (tmp_path / "old").exists()


def test_a_run_folder_that_was_removed_meanwhile_is_released(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.hold()
    shutil.rmtree(run.path)
    run.release()
