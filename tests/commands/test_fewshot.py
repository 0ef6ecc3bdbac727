"""`vitrail fewshot` and `vitrail probe`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, photos  # noqa: F401 - fixtures


def test_few_shot_prints_and_saves(capsys: pytest.CaptureFixture[str], backbone: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ("fewshot", backbone, "--data", photos, "--seeds", "2", "--out", tmp_path / "f.json", "--overwrite", "--shots")
    status, out, _ = run(capsys, *words, "1", "5")
    saved = json.loads((tmp_path / "f.json").read_text())
    assert status == 0 and "± std" in out and set(saved["scores"]) == {"1", "5"}
    assert [len(one["files"]) for one in saved["trials"]] == [4, 20, 4, 20] and saved["protocol"]["l2"] == 1024
    status, _, err = run(capsys, *words, "1", "25")
    assert (
        status == 2
        and "Class 'blue' has 12 images, fewer than 25 shots. 3 more classes are also too small." in err
        and "--small-classes drop" in err
    )


def test_a_probe_prints_and_saves(capsys: pytest.CaptureFixture[str], backbone: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ("probe", backbone, "--data", photos, "--out", tmp_path / "p.json", "--overwrite")
    status, out, _ = run(capsys, *words, "--l2", "0.1", "0.001", "--feature", "mean")
    saved = json.loads((tmp_path / "p.json").read_text())
    assert status == 0 and "logistic probe on val" in out and saved["features"]["feature"] == "mean"
    status, out, _ = run(capsys, *words, "--method", "knn", "--json")
    assert status == 0 and json.loads(out)["probe"]["method"] == "knn"
