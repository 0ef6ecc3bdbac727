"""The model that is part of the package: found by name from anywhere, verified, and in the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

import vitrail
from vitrail.checkpoints import load
from vitrail.checkpoints.model_card import model_card
from vitrail.checkpoints.pretrained import DEFAULT, pretrained_models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError

ROOT = Path(__file__).parents[2]
MAX_SIZE = 12_000_000


def test_the_included_model_loads_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT).mkdir()  # a folder of the same name needs ./ in front
    bundle = vitrail.load(DEFAULT, verify="full")
    assert bundle.report.source == DEFAULT and bundle.head == "set" and bundle.model.norm.weight.dtype is torch.float32
    assert bundle.preprocess == Preprocess(size=(64, 64), resize="short-side", resize_to=70)
    assert bundle.classes is not None and len(set(bundle.classes)) == 200 and "king penguin" in bundle.classes
    with pytest.raises(VitrailError, match="is a folder without a checkpoint"):
        vitrail.load(f"./{DEFAULT}")


def test_a_mistyped_name_is_suggested() -> None:
    with pytest.raises(VitrailError, match=f"Did you mean {DEFAULT}"):
        vitrail.load("vitrail-ti8-tinyimagenet")


def test_each_included_model_is_small() -> None:
    assert sum(file.stat().st_size for folder in pretrained_models().values() for file in folder.iterdir()) <= MAX_SIZE


@pytest.mark.parametrize("name", pretrained_models())
def test_the_card_of_an_included_model_is_the_generated_one(name: str) -> None:
    """`vitrail info NAME --card > README.md` writes it; what is written by hand is in notes.md."""
    folder = pretrained_models()[name]
    stored = (folder / "README.md").read_text(encoding="utf-8")
    assert stored == model_card(load(name))
    data = ModelCard(stored).data.to_dict()
    assert data["library_name"] == "vitrail" and data["license_name"] and data["model-index"][0]["results"]
    assert (folder / "notes.md").read_text(encoding="utf-8").strip() in stored and "GMACs" in stored and "| parameters |" in stored


@pytest.mark.slow
def test_the_wheel_contains_all_files(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    source = ROOT / "src"
    files = [file for file in (source / "vitrail").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    names = {file.name for file in files}
    assert {
        "published.csv",
        "digits.gz",
        "imagenet_classes.tsv.gz",
        "model.safetensors",
        "index.html",
        "main.js",
        "style.css",
        "py.typed",
    } <= names
    for file in files:
        assert sizes[file.relative_to(source).as_posix()] == file.stat().st_size
    assert wheel.stat().st_size <= MAX_SIZE
