"""Precisions in the commands: `predict`, `eval`, `embed` and `doctor` on a CPU."""
# ruff: noqa: F811 - fixtures come in by name

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, checkpoint, photos  # noqa: F401 - fixtures
from vitrail.models.inference import precision as precision_module
from vitrail.models.inference.precision import CpuFeatures

PRECISIONS = ("fp32", "bf16", "int8", "auto", "fp16")


def predicted(capsys: Any, checkpoint: Path, photos: Path, *words: str) -> tuple[list[Any], str]:
    status, out, err = run(capsys, "predict", checkpoint, photos / "val", "--json", "--top", "4", *words)
    assert status == 0
    return [json.loads(line) for line in out.splitlines()], err


@pytest.fixture
def all_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with every instruction, and no model too small to gain from them."""
    monkeypatch.setattr(precision_module, "cpu_features", lambda: CpuFeatures(int8=True, bf16=True))
    monkeypatch.setattr(precision_module, "MIN_FLOPS_INT8", 0)


def test_predict_says_what_it_computed_in(capsys: Any, checkpoint: Path, photos: Path, all_features: None) -> None:
    exact, silence = predicted(capsys, checkpoint, photos, "--precision", "fp32")
    rounded, said = predicted(capsys, checkpoint, photos)
    assert silence == ""
    assert said == "computed in int8: the CPU has VNNI, so int8 matmuls are its fastest; fp32 computes exactly\n"
    apart = [
        abs(one["probability"] - two["probability"])
        for image, same in zip(exact, rounded, strict=True)
        for one, two in zip(*(sorted(row["predictions"], key=lambda answer: answer["index"]) for row in (image, same)), strict=True)
    ]
    assert 0 < max(apart) < 0.05


def test_a_small_model_is_computed_in_float32_without_a_word(capsys: Any, checkpoint: Path, photos: Path) -> None:
    exact, _ = predicted(capsys, checkpoint, photos, "--precision", "fp32")
    usual, said = predicted(capsys, checkpoint, photos)
    assert usual == exact and said == ""


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_predictions_do_not_depend_on_the_batch(
    capsys: Any,
    checkpoint: Path,
    photos: Path,
    precision: str,
    all_features: None,
) -> None:
    found = [predicted(capsys, checkpoint, photos, "--precision", precision, "--batch", size)[0] for size in ("1", "5", "64")]
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            ours, theirs = ({answer["label"]: answer["probability"] for answer in row["predictions"]} for row in (one, two))
            tolerance = 0.01 if precision == "fp16" else 1e-5
            assert ours == pytest.approx(theirs, abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_eval_takes_every_precision(capsys: Any, checkpoint: Path, photos: Path, precision: str, all_features: None) -> None:
    status, out, _ = run(capsys, "eval", checkpoint, "--data", photos, "--json", "--precision", precision)
    (result,) = json.loads(out)["results"]
    said = [note for note in result["notes"] if note.startswith("computed in")]
    assert status == 0 and result["metrics"]["accuracy"] > 0.5
    assert len(said) == (precision in ("bf16", "int8", "auto"))


def test_features_are_exact_unless_asked(capsys: Any, checkpoint: Path, photos: Path, tmp_path: Path, all_features: None) -> None:
    found = {}
    for precision in ("default", "fp32", "int8"):
        file, words = tmp_path / f"{precision}.npz", () if precision == "default" else ("--precision", precision)
        status, _, err = run(capsys, "embed", checkpoint, photos / "val", "--out", file, *words)
        assert status == 0 and ("computed in int8" in err) == (precision == "int8")
        found[precision] = np.load(file)["features"]
    assert np.array_equal(found["default"], found["fp32"])
    assert 0 < np.abs(found["int8"] - found["fp32"]).max() / np.abs(found["fp32"]).max() < 0.1


@pytest.mark.slow
def test_doctor_says_what_auto_takes(capsys: Any, all_features: None) -> None:
    status, out, _ = run(capsys, "doctor", "--json")
    assert status == 0
    assert json.loads(out)["devices"][-1]["inference"] == {
        "precision": "int8",
        "why": "the CPU has VNNI, so int8 matmuls are its fastest",
    }
