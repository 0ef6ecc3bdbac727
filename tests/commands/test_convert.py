"""`vitrail convert` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import vitrail
from tests.checkpoints.small_models import KINDS, SUFFIX, bundle_of
from vitrail.checkpoints import write
from vitrail.cli import main

CONVERTIBLE = ("google", "big-vision", "timm", "hf", "torchvision", "vitrail")
SIZES = ["--heads", "4", "--grid", "4", "4"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("source", CONVERTIBLE)
@pytest.mark.parametrize("to", CONVERTIBLE)
def test_every_format_into_every_other(source: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = bundle_of(KINDS["plain"])
    write(bundle, tmp_path / f"in{SUFFIX[source]}", source)
    sizes = [] if source == "vitrail" else SIZES
    code, out, err = run(
        capsys, "convert", str(tmp_path / f"in{SUFFIX[source]}"), str(tmp_path / f"out{SUFFIX[to]}"), "--to", to, *sizes
    )
    assert code == 0, err
    assert "100.0 %" in out and "read back and verified" in out.replace("\n", " ")
    again = vitrail.load(tmp_path / f"out{SUFFIX[to]}", **({} if to == "vitrail" else {"heads": 4, "grid": (4, 4)}))
    assert all(torch.equal(tensor, again.model.state_dict()[name]) for name, tensor in bundle.model.state_dict().items())


def test_the_table_lists_the_mapping_of_each_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(bundle_of(KINDS["plain"]), tmp_path / "in.npz", "google")
    code, out, _ = run(capsys, "convert", str(tmp_path / "in.npz"), str(tmp_path / "out"), "--json")
    found = json.loads(out)
    assert code == 0 and found["percent"] == 100.0 and found["from"] == "google"
    rows = {row["ours"]: row for row in found["mapped"]}
    assert rows["patches.weight"]["theirs"] == ["embedding/kernel"] and rows["patches.weight"]["rule"] == "HWIO → OIHW"
    assert len(rows["blocks.0.attention.qkv.weight"]["theirs"]) == 3
    assert rows.keys() == bundle_of(KINDS["plain"]).model.state_dict().keys()
    code, out, _ = run(capsys, "convert", str(tmp_path / "in.npz"), str(tmp_path / "out2"), "--all")
    assert out.count("HWIO") == 1


def test_class_names_and_preprocessing_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(bundle_of(KINDS["plain"]), tmp_path / "in.npz", "google")
    (tmp_path / "names.txt").write_text("ant\nbee\ncat\ndog\neel\n")
    arguments = ["convert", str(tmp_path / "in.npz"), str(tmp_path / "out"), "--classes", str(tmp_path / "names.txt")]
    code, _, err = run(capsys, *arguments, "--preprocess", "imagenet")
    assert code == 0, err
    bundle = vitrail.load(tmp_path / "out")
    assert bundle.classes == ("ant", "bee", "cat", "dog", "eel")
    assert bundle.preprocess is not None and bundle.preprocess.name == "imagenet"
    assert bundle.provenance["format"] == "google" and len(bundle.provenance["sha256"]) == 64


def test_errors_are_clear_and_leave_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not really")
    code, _, err = run(capsys, "convert", str(tmp_path / "bad.npz"), str(tmp_path / "out"))
    assert code == 2 and err.startswith("vitrail: ") and "Traceback" not in err
    write(bundle_of(KINDS["plain"]), tmp_path / "in.safetensors", "timm")
    code, _, err = run(capsys, "convert", str(tmp_path / "in.safetensors"), str(tmp_path / "out"))
    assert code == 2 and "--heads" in err
    assert sorted(item.name for item in tmp_path.iterdir()) == ["bad.npz", "in.safetensors"]


def test_what_a_folder_stores_is_not_called_lost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = vitrail.create_model("Ti/16", image_size=32, outputs=3, seed=0)  # with the paper's tanh GELU
    vitrail.save(tmp_path / "own", model)
    status, out, _ = run(capsys, "convert", str(tmp_path / "own"), str(tmp_path / "folder"), "--to", "timm")
    assert status == 0 and "cannot store gelu" not in out
    status, out, _ = run(capsys, "convert", str(tmp_path / "own"), str(tmp_path / "file.safetensors"), "--to", "timm")
    assert status == 0 and "cannot store gelu" in out
