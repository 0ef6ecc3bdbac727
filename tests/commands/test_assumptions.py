"""What a bare file does not show is printed by every command that reads it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.checkpoints.small_models import KINDS, bundle_of
from tests.commands.test_eval import run
from tests.evaluate.conftest import photos  # noqa: F401 - a fixture
from tests.evaluate.test_suites import TASKS, eurosat, small_draws  # noqa: F401 - a fixture
from vitrail.checkpoints import load, write
from vitrail.evaluate.suite_run import TaskScore
from vitrail.export.artefact import Artefact
from vitrail.serve.service import models_of


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A file with timm's names and nothing else, as of DeiT."""
    model = vitrail.create_model("Ti/16", image_size=32, outputs=4, seed=0)  # a known shape
    torch.nn.init.normal_(model.head.weight)
    vitrail.save(tmp_path / "own", model)
    from vitrail.checkpoints.conversion import convert

    convert(tmp_path / "own", tmp_path / "deit.safetensors", to="timm")
    return tmp_path / "deit.safetensors"


@pytest.mark.slow
def test_guesses_are_printed_once_and_not_when_given(
    capsys: pytest.CaptureFixture[str],
    bare: Path,
    photos: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    image = next(photos.rglob("*.png"), None) or next(photos.rglob("*.jpg"))
    assumed = load(bare).report.assumptions
    assert any("preprocessing" in text for text in assumed)
    for words in (("predict", bare, image), ("embed", bare, image, "--out", tmp_path / "e.npz")):
        _, _, err = run(capsys, *words, "--workers", 0)
        assert err.count("does not store its preprocessing") == 1
        _, _, err = run(capsys, *words, "--workers", 0, "--preprocess", "deit")
        assert "does not store its preprocessing" not in err
    _, out, _ = run(capsys, "predict", bare, image, image, "--workers", 0, "--json")
    assert [json.loads(line)["assumptions"] for line in out.splitlines()] == [assumed, assumed]
    _, out, _ = run(capsys, "predict", bare.parent / "own", image, "--workers", 0, "--json", "--preprocess", "deit")
    assert "assumptions" not in json.loads(out)
    words = ("eval", bare, "--data", photos, "--match", "order", "--workers", 0)
    status, out, _ = run(capsys, *words, "--json")
    assert status == 0 and json.loads(out)["assumptions"] == assumed and json.loads(out)["results"][0]["trained_on"] is None
    status, out, err = run(capsys, *words, "--image-sizes", 32, 48, "--out", tmp_path / "report")
    assert status == 0 and (out + err).count("does not store its preprocessing") == 1
    assert "assumed: the file does not store its preprocessing" in (tmp_path / "report" / "report.html").read_text()


def test_vtab_tells_what_was_assumed(
    capsys: pytest.CaptureFixture[str], bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = TaskScore("eurosat", "EuroSAT", "specialized", 0.5, (0.4, 0.6), 8, 8, False, "here")
    monkeypatch.setattr("vitrail.evaluate.suite_run.run_task", lambda *args, **options: score)
    eurosat(TASKS["eurosat"], tmp_path)
    status, out, _ = run(capsys, "vtab", bare, "--root", tmp_path, "--out", tmp_path / "runs", "--tasks", "specialized", "--json")
    assert status == 0 and json.loads(out)["assumptions"] == load(bare).report.assumptions != []
    assert json.loads((tmp_path / "runs" / "results.json").read_text())["assumptions"] == json.loads(out)["assumptions"]


def test_the_explorer_and_the_service_say_what_was_assumed(
    capsys: pytest.CaptureFixture[str],
    bare: Path,
    photos: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    image = next(photos.rglob("*.png"), None) or next(photos.rglob("*.jpg"))
    page = ("explore", bare, image, "--save", tmp_path / "page.html")
    assert run(capsys, *page)[0] == 0
    assert caplog.text.count("does not store its preprocessing") == 1
    caplog.clear()
    assert run(capsys, *page, "--overwrite", "--preprocess", "deit")[0] == 0
    assert "does not store its preprocessing" not in caplog.text
    models_of([str(bare)], None)["deit"]()  # as `vitrail serve` loads it
    assert caplog.text.count("does not store its preprocessing") == 1


@pytest.mark.slow
def test_an_exported_file_records_what_was_assumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = tmp_path / "x.npz"
    write(bundle_of(KINDS["plain"]), bare, "google")
    out = tmp_path / os.fsdecode(b"caf\xe9") if sys.platform == "linux" else tmp_path / "out"
    status, _, err = run(capsys, "export", bare, out, "--format", "pt2")
    assert status == 0 and err.count("does not store its preprocessing") == 1
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["assumptions"] == load(bare).report.assumptions
    status, _, err = run(capsys, "export", "verify", out, bare, "--preprocess", "deit")
    assert "does not store its preprocessing" not in err
    assert Artefact.open(out).metadata["assumptions"] == load(bare).report.assumptions


def test_what_was_assumed_can_be_changed_by_options(capsys: pytest.CaptureFixture[str], bare: Path, tmp_path: Path) -> None:
    words = ("--gelu", "tanh", "--norm-eps", 1e-5, "--pooling", "mean", "--preprocess", "deit", "--json")
    status, out, _ = run(capsys, "convert", bare, tmp_path / "own2", *words)
    assert status == 0 and not any("gelu" in text or "preprocessing" in text for text in json.loads(out)["assumptions"])
    config: Any = load(tmp_path / "own2").model.config
    assert (config.gelu, config.norm_eps, config.pooling) == ("tanh", 1e-5, "mean")
    status, out, _ = run(capsys, "train", "digits", "--preprocess", "deit", "--explain")
    assert status == 0 and re.search(r"data\.preprocess +deit", out)
