"""What a client reads from an exported file is what the checkpoint says, or verification fails; what it cannot read is refused."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.export.test_export import TINY, bundle_of
from vitrail.checkpoints.native import save
from vitrail.cli import main
from vitrail.export import Artefact, ExportSettings, export_model
from vitrail.export.verify import sample_photos

THRESHOLDS = [0.2, 0.9, 0.5, 0.5, 0.5]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of several labels and exports of it."""
    import vitrail

    folder = tmp_path_factory.mktemp("metadata")
    plain = bundle_of(folder, **TINY)
    about: Any = {"preprocess": plain.preprocess, "classes": plain.classes, "task": "multilabel"}
    save(folder / "several", plain.model, **about, provenance={"task": {"thresholds": THRESHOLDS}})
    bundle = vitrail.load(folder / "several")
    for format in ("onnx", "pt2"):
        export_model(bundle, folder / format, ExportSettings(format=format), images=sample_photos(2))  # type: ignore[arg-type]
    return folder


def changed(exported: Path, folder: Path, key: str, value: Any, format: str = "onnx") -> Path:
    """Copy an export and replace an entry of its metadata, or remove it (None)."""
    shutil.copytree(exported / format, folder / format)
    file = folder / format / f"model.{format}"
    if format == "onnx":
        model = onnx.load(str(file))
        entries = {entry.key: entry.value for entry in model.metadata_props}
        text = value if isinstance(value, str) else json.dumps(value)
        entries = {**entries, f"vitrail.{key}": text} if value is not None else _without(entries, f"vitrail.{key}")
        onnx.helper.set_model_props(model, entries)
        onnx.save(model, str(file))
        return file.parent
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in contents if name.endswith("vitrail.json")]
    entries = json.loads(contents[name])
    entries = {**entries, key: value} if value is not None else _without(entries, key)
    with zipfile.ZipFile(file, "w") as archive:
        for other, content in contents.items():
            archive.writestr(other, json.dumps(entries) if other == name else content)
    return file.parent


def _without(entries: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if name != key}


def verify(exported: Path, artefact: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", "verify", str(artefact), str(exported / "several")])
    return int(ended.value.code or 0)


def preprocess(exported: Path, **fields: Any) -> dict[str, Any]:
    return {**Artefact.open(exported / "onnx").metadata["preprocess"], **fields}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_several_labels_are_verified(exported: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(exported, exported / format) == 0
    assert "of the labels that either chooses" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("classes", ["b", "a", "c", "d", "é"], 'vitrail.classes[0] is "b", expected "a" (2 of 5 differ)'),
        ("classes", ["a", "b"], 'vitrail.classes is ["a", "b"], expected 5 values'),
        ("thresholds", [0.2, 0.1, 0.5, 0.5, 0.5], "vitrail.thresholds[1] is 0.1, expected 0.9"),
        ("task", "classify", 'vitrail.task is "classify", expected "multilabel"'),
        ("activation", "softmax", 'vitrail.activation is "softmax", expected "sigmoid"'),
        ("model", "ViT-B/16", 'vitrail.model is "ViT-B/16", expected "ViT-Ti/8"'),
        ("mean", [0.5, 0.5, 0.25], "vitrail.preprocess.mean[2] is 0.25, expected 0.5"),
        ("std", [0.1, 0.1, 0.1], "vitrail.preprocess.std[0] is 0.1, expected 0.5 (3 of 3 differ)"),
        ("resize", "none", 'vitrail.preprocess.resize is "none", expected "square"'),
        ("interpolation", "bicubic", 'vitrail.preprocess.interpolation is "bicubic", expected "bilinear"'),
        ("exif", False, "vitrail.preprocess.exif is false, expected true"),
    ],
)
def test_metadata_that_differ_from_the_checkpoint_fail(
    exported: Path, tmp_path: Path, key: str, value: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if key in ("mean", "std", "resize", "interpolation", "exif"):
        key, value = "preprocess", preprocess(exported, **{key: value})
    assert verify(exported, changed(exported, tmp_path, key, value)) == 1
    out = capsys.readouterr().out
    assert message in out.replace("\n", " ") and "computes what the checkpoint does" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("precision", "fp12", 'vitrail.precision is "fp12", expected fp32 or'),
        ("precision", None, "its metadata has no precision"),
        ("task", None, "its metadata has no task"),
        ("thresholds", None, "its metadata has no thresholds"),
        ("thresholds", ["high"], 'vitrail.thresholds is ["high"], expected a list of numbers'),
        ("classes", {"a": 1}, 'vitrail.classes is {"a": 1}, expected a list of names'),
        ("preprocess", [1], "vitrail.preprocess cannot be read"),
        ("size", [48, 48], "describe [any, 3, 48, 48] of type"),
        ("antialias_", True, "vitrail.preprocess cannot be read (Unknown preprocessing key 'antialias_'"),
        ("resize_to", "x", "vitrail.preprocess cannot be read"),
        ("input", "somehow", 'vitrail.input is "somehow", expected normalised or pixels or images'),
        ("input", "images", "but the model takes [any, 3, 32, 32] of type float32"),
        ("input_type", "uint8", 'of type "uint8"'),
    ],
)
def test_metadata_that_cannot_be_read_are_a_sentence(
    exported: Path, tmp_path: Path, key: str, value: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if key in ("size", "antialias_", "resize_to"):
        key, value = "preprocess", preprocess(exported, **{key: value})
    assert verify(exported, changed(exported, tmp_path, key, value)) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "is not as `vitrail export` wrote it" in err and message in err and "Traceback" not in err


@pytest.mark.slow
def test_the_metadata_of_a_program_are_checked_too(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(exported, changed(exported, tmp_path / "1", "classes", ["b", "a", "c", "d", "é"], "pt2")) == 1
    assert 'vitrail.classes[0] is "b", expected "a" (2 of 5 differ)' in capsys.readouterr().out
    assert verify(exported, changed(exported, tmp_path / "2", "precision", "int8", "pt2")) == 2
    assert 'vitrail.precision is "int8", expected fp32 or fp16 or bf16' in " ".join(capsys.readouterr().err.split())
    assert verify(exported, changed(exported, tmp_path / "3", "input_type", "uint8", "pt2")) == 2
    assert "but the model takes [any, 3, 32, 32] of type float32" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_metadata_that_are_no_dictionary_are_a_sentence(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(exported, tmp_path, "task", "classify", "pt2")
    file = folder / "model.pt2"
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, b"[1, 2]" if name.endswith("vitrail.json") else content)
    assert verify(exported, folder) == 2
    assert "its metadata has no model, config" in " ".join(capsys.readouterr().err.split())
