"""Exported models compute what the PyTorch model does, on onnxruntime and torch.export, or are not written."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import ExifTags, Image
from torch import nn

import vitrail
from vitrail.checkpoints import Bundle
from vitrail.checkpoints.native import save
from vitrail.cli import main
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.export import Artefact, ExportSettings, export_model
from vitrail.export.quantise import layers_to_quantise
from vitrail.export.verify import Comparison, sample_photos
from vitrail.models import create_model

TINY = {"width": 32, "depth": 2, "heads": 2, "mlp": 64, "patch": 8, "image_size": 32}


def bundle_of(folder: Path, name: str = "ViT-Ti/16", preprocess: Preprocess | None = None, **options: Any) -> Bundle:
    """Return a model with values everywhere, as saved and loaded."""
    torch.manual_seed(0)
    model = create_model(name, outputs=5, seed=0, **options)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.5)
    preprocess = preprocess or Preprocess(size=model.config.image_size)
    save(folder / "checkpoint", model, preprocess=preprocess, classes=["a", "b", "c", "d", "é"])
    return vitrail.load(folder / "checkpoint")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return bundle_of(tmp_path, **TINY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ViT-Ti/16", TINY),
        ("ViT-Ti/16", {**TINY, "pooling": "map", "qk_norm": True, "layer_scale": 0.1, "registers": 2, "gelu": "erf"}),
        ("ViT-Ti/16", {**TINY, "position": "relative", "image_size": (32, 48)}),
        ("R50+ViT-B/16", {"width": 32, "depth": 1, "heads": 2, "mlp": 64, "image_size": 64, "layers": (1, 1, 1)}),
        ("BiT-R50x1", {"image_size": 64, "layers": (1, 1)}),
    ],
)
@pytest.mark.parametrize("opset", [18, 23])
def test_onnxruntime_computes_the_same_logits_at_any_batch_size(
    tmp_path: Path, name: str, options: dict[str, Any], opset: int
) -> None:
    bundle = bundle_of(tmp_path, name, **options)
    export_model(bundle, tmp_path / "out", ExportSettings(opset=opset), images=sample_photos(4))
    artefact = Artefact.open(tmp_path / "out")
    for count in (1, 5):
        batch = artefact.prepare(sample_photos(count))
        expected = bundle.model.double()(torch.from_numpy(batch).double()).detach().numpy()
        assert np.abs(artefact.run(batch) - expected).max() < 2e-5 * max(1.0, np.ptp(expected))
        bundle.model.float()
    assert artefact.classes == ("a", "b", "c", "d", "é")
    assert artefact.preprocess == bundle.preprocess
    operators = {node.op_type for node in onnx.load(str(artefact.path)).graph.node}
    if name.startswith("ViT"):
        assert "LayerNormalization" in operators and ("Attention" in operators) == (opset == 23)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.slow
def test_torch_export_computes_the_same_logits(tmp_path: Path, bundle: Bundle, precision: Any) -> None:
    comparison = export_model(bundle, tmp_path / "out", ExportSettings(format="pt2", precision=precision), images=sample_photos(3))
    assert comparison.max_difference <= {"fp32": 1e-6, "fp16": 1e-2, "bf16": 6e-2}[precision] * comparison.spread
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["precision"] == precision and report["problems"] == []
    assert report["comparison"]["images"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_a_full_disk_is_one_message(tmp_path: Path, bundle: Bundle, format: str) -> None:
    """torch's writer aborts the process if its file cannot be written."""
    pytest.importorskip("resource")
    lines = [
        "import resource; import torch, onnx, onnxscript, vitrail.export.write; from vitrail.cli import main",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))",
        f"main(['export', {str(tmp_path / 'checkpoint')!r}, {str(tmp_path / 'out')!r}, '--format', {format!r}])",
    ]
    found = subprocess.run([sys.executable, "-B", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and found.stderr.count("\n") == 1 and f"Cannot write {tmp_path / 'out'}" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "none"])
def test_pixels_are_normalised_in_the_graph(tmp_path: Path, rounding: Any) -> None:
    preprocess = Preprocess(size=(32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), rounding=rounding)
    bundle = bundle_of(tmp_path, preprocess=preprocess, **TINY)
    comparison = export_model(bundle, tmp_path / "out", ExportSettings(pixels=True))
    assert comparison.max_difference < 2e-5 * comparison.spread
    batch = Artefact.open(tmp_path / "out").prepare(sample_photos(2))
    assert batch.shape == (2, 32, 32, 3) and batch.dtype == (np.uint8 if rounding == "nearest" else np.float32)


@pytest.mark.slow
def test_positions_are_resized_before_export(tmp_path: Path, bundle: Bundle) -> None:
    export_model(bundle, tmp_path / "out", ExportSettings(image_size=48))
    artefact = Artefact.open(tmp_path / "out")
    batch = artefact.prepare(sample_photos(2))
    assert batch.shape[2:] == (48, 48) and bundle.model.config.image_size == (32, 32)
    with torch.no_grad():
        expected = bundle.model.resize(48)(torch.from_numpy(batch)).numpy()
    assert np.abs(artefact.run(batch) - expected).max() < 2e-5 * np.ptp(expected)
    with pytest.raises(SystemExit) as ended:
        main(["export", "verify", str(tmp_path / "out"), str(tmp_path / "checkpoint")])
    assert not ended.value.code  # the checkpoint is resized, too


@pytest.mark.slow
def test_int8_leaves_the_first_and_the_last_layer_and_products_of_activations(tmp_path: Path, bundle: Bundle) -> None:
    with pytest.raises(VitrailError, match="--calibrate"):
        export_model(bundle, tmp_path / "none", ExportSettings(precision="int8"))
    assert not (tmp_path / "none").exists()
    comparison = export_model(bundle, tmp_path / "out", ExportSettings(precision="int8"), calibrate=sample_photos(8), force=True)
    assert 0 < comparison.max_difference < 0.2 * comparison.spread
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.onnx", "report.json"]
    export_model(bundle, tmp_path / "float", ExportSettings())
    graph = onnx.load(str(tmp_path / "float" / "model.onnx")).graph
    assert len(layers_to_quantise(graph)) == 2 * 4  # qkv, out, up and down of two blocks
    quantised = onnx.load(str(tmp_path / "out" / "model.onnx")).graph
    assert sum(node.op_type == "DequantizeLinear" for node in quantised.node) >= 2 * 8
    kinds = {node.input[0] for node in quantised.node if node.op_type == "QuantizeLinear"}
    produced = {name: node.op_type for node in quantised.node for name in node.output}
    inputs = {"LayerNormalization", "Gelu", "Mul", "Transpose", "Reshape"}  # not products, which are added in float32
    assert {produced[name] for name in kinds} <= inputs


def test_the_first_layer_is_found_where_its_weight_is_reshaped() -> None:
    from onnx import helper

    def tensor(name: str, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    steps = [("Reshape", ["kernel", "shape"], "flat"), ("Transpose", ["flat"], "patch"), ("MatMul", ["x", "patch"], "tokens")]
    steps += [("MatMul", ["tokens", "w"], "a"), ("MatMul", ["a", "tokens"], "product"), ("MatMul", ["product", "w"], "b")]
    steps += [("MatMul", ["b", "head"], "logits")]
    nodes = [helper.make_node(kind, inputs, [output], name=output) for kind, inputs, output in steps]
    weights = [helper.make_tensor(name, onnx.TensorProto.FLOAT, [1], [0.0]) for name in ("kernel", "w", "head", "shape")]
    graph = helper.make_graph(nodes, "g", [tensor("x", [1])], [tensor("logits", [1])], weights)
    assert layers_to_quantise(graph) == ["a", "b"]


@pytest.mark.slow
def test_a_model_that_differs_is_not_written(tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.export import module

    class Wrong(module.Exported):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) * 1.001

    monkeypatch.setattr(module, "Exported", Wrong)
    settings = ExportSettings(format="pt2")
    with pytest.raises(VitrailError, match=r"does not compute what the PyTorch model does.*logits differ by up to"):
        export_model(bundle, tmp_path / "out", settings, images=sample_photos(2))
    assert not (tmp_path / "out").exists()
    export_model(bundle, tmp_path / "out", settings, images=sample_photos(2), force=True)
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["forced"] is True
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(VitrailError, match="so it was not written"):
        export_model(bundle, tmp_path / "out", settings, images=sample_photos(2))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before  # the old one survives
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_accuracies_are_compared_where_labels_are_known(tmp_path: Path, bundle: Bundle) -> None:
    photos = sample_photos(6)
    labels = [prediction[0].index for prediction in bundle.predict(photos, top=1)]
    labels[0] = (labels[0] + 1) % 5
    comparison = export_model(bundle, tmp_path / "out", ExportSettings(format="pt2"), images=photos, labels=labels)
    assert comparison.accuracy == comparison.reference_accuracy == pytest.approx(5 / 6)
    assert comparison.data == "your data"  # not the photos that stand in where no images are given


def test_limits_of_each_precision() -> None:
    def found(difference: float, agreement: float, precision: str) -> int:
        return len(Comparison(24, "x", difference, 10.0, agreement).problems(precision))

    assert found(9e-4, 1.0, "fp32") == 0 and found(2e-3, 1.0, "fp32") == 1
    assert found(0.09, 1.0, "fp16") == 0 and found(0.09, 0.9, "fp16") == 1
    assert found(9.0, 0.96, "int8") == 0 and found(0.1, 0.9, "int8") == 1
    assert found(float("nan"), 1.0, "int8") == 1


def test_settings_that_cannot_be_are_refused(tmp_path: Path, bundle: Bundle) -> None:
    with pytest.raises(VitrailError, match="onnx files cannot have precision bf16; use one of fp32, fp16, int8"):
        ExportSettings(precision="bf16")
    with pytest.raises(VitrailError, match="pt2 files cannot have precision int8"):
        ExportSettings(format="pt2", precision="int8")
    with pytest.raises(VitrailError, match="from 18 to 23"):
        ExportSettings(opset=12)
    with pytest.raises(VitrailError, match="format is 'tflite'; it must be onnx or pt2"):
        ExportSettings(format="tflite")  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(VitrailError, match="exists and is not an exported model"):
        export_model(bundle, tmp_path / "full", ExportSettings(format="pt2"))
    for name in ("pets.onnx", "pets.pt2"):
        with pytest.raises(VitrailError, match=rf"{name} is the name of a file. Give a folder such as .*pets;"):
            export_model(bundle, tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(VitrailError, match="not an exported model"):
        Artefact.open(tmp_path / "full")
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07garbage")
    with pytest.raises(VitrailError, match="cannot be read as an ONNX model"):
        Artefact.open(tmp_path / "model.onnx")


def test_a_corrupted_program_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"\x08\x07garbage")
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logging.getLogger("torch.export").addHandler(handler)
    try:
        with pytest.raises(VitrailError, match=r"model\.pt2 cannot be read as a torch\.export program \(.+\)\. Export or copy it"):
            Artefact.open(tmp_path / "model.pt2")
    finally:
        logging.getLogger("torch.export").removeHandler(handler)
    assert not logged


@pytest.mark.slow
def test_the_documented_lines_without_vitrail_predict_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run docs/export.md's block for onnxruntime, NumPy and Pillow on a rectangle that its EXIF data turns."""
    preprocess = Preprocess(size=(32, 32), resize="short-side", resize_to=37, interpolation="bilinear")
    bundle = bundle_of(tmp_path, preprocess=preprocess, **TINY)
    monkeypatch.chdir(tmp_path)
    export_model(bundle, "pets-onnx", images=sample_photos(2))
    photo, exif = sample_photos(1)[0].resize((161, 107)), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo.save("cat.jpg", exif=exif)
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pets-onnx/model.onnx" in block]
    found: dict[str, Any] = {}
    exec(code, found)
    expected = bundle.model(bundle.stored_preprocess()("cat.jpg")[None]).detach().numpy()[0]
    np.testing.assert_allclose(found["logits"], expected, atol=1e-4)
    assert capsys.readouterr().out.strip() == bundle.predict("cat.jpg", top=1)[0][0].label
