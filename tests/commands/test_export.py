"""`vitrail export`, as a user types it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, checkpoint, photos, tiny_model  # noqa: F401 - fixtures


@pytest.mark.slow
def test_export_and_verify(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    words = ("export", checkpoint, out, "--format", "pt2", "--data", f"folder:{photos}", "--images", "5")
    status, text, _ = run(capsys, *words)
    assert status == 0 and "pt2, fp32: 5 images of folder:" in text and "same top class for 100.0%" in text
    assert "accuracy" in text
    again = shlex.split(text.partition("check it again with: ")[2])  # on the same images
    assert again[:3] == ["vitrail", "export", "verify"]
    status, text, _ = run(capsys, *again[1:])
    assert status == 0 and f"5 images of folder:{photos}" in text and "accuracy" in text
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["comparison"]["images"] == 5
    status, text, _ = run(capsys, "export", "verify", out, checkpoint, "--json")
    assert status == 0 and json.loads(text)["problems"] == []


@pytest.mark.slow
def test_labels_that_the_model_does_not_have_are_mentioned(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,  # noqa: F811
    photos: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    shutil.copytree(photos, tmp_path / "renamed")
    for split in ("train", "val"):
        some = min((tmp_path / "renamed" / split).iterdir())
        some.rename(some.with_name("n01440764"))
    words = ("export", checkpoint, tmp_path / "out", "--format", "pt2", "--data", f"folder:{tmp_path / 'renamed'}", "--images", "2")
    status, text, err = run(capsys, *words)
    assert status == 0 and "accuracy" not in text
    assert "accuracies are not compared" in err and "it has no class 'n01440764'" in err


@pytest.mark.slow
def test_another_checkpoint_is_noticed(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    from vitrail import load
    from vitrail.checkpoints import save

    assert run(capsys, "export", checkpoint, tmp_path / "out", "--format", "pt2")[0] == 0
    bundle = load(checkpoint)
    bundle.model.norm.weight.data *= 1.1
    save(tmp_path / "other", bundle.model, preprocess=bundle.preprocess, classes=bundle.classes)
    status, text, _ = run(capsys, "export", "verify", tmp_path / "out", tmp_path / "other")
    assert status == 1 and "logits differ by up to" in text


def test_int8_needs_images(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    status, _, err = run(capsys, "export", checkpoint, tmp_path / "out", "--precision", "int8")
    assert status == 2 and "--calibrate" in err and not (tmp_path / "out").exists()
