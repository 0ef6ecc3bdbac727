"""What is verified depends on the task, and on whether labels are known."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import vitrail
from tests.export.test_export import TINY, bundle_of
from vitrail.checkpoints import Bundle
from vitrail.checkpoints.native import save
from vitrail.cli import main
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.export import Artefact, Comparison, ExportSettings, compare, export_model
from vitrail.export.blocks import block_errors
from vitrail.export.module import exported_module
from vitrail.export.quantise import layers_to_quantise
from vitrail.export.verify import images_of, sample_photos


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return bundle_of(tmp_path, **TINY)


def artefact(outputs: Any) -> Artefact:
    """Return an exported model that gives these outputs, one row per image."""
    rows = iter(np.asarray(outputs, np.float32))
    opened = Artefact(Path("x"), "onnx", {"preprocess": None}, lambda batch: batch)
    object.__setattr__(opened, "logits", lambda images: np.stack([next(rows) for _ in images]))
    return opened


def logits_of(bundle: Bundle, images: list[Any]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return bundle.model.eval()(torch.stack([bundle.stored_preprocess()(image) for image in images])).numpy()


def test_values_of_a_regression_are_compared_even_in_int8(bundle: Bundle) -> None:
    bundle = dataclasses.replace(bundle, task="regress", classes=None)
    photos = sample_photos(6)
    expected = logits_of(bundle, photos)
    good = compare(bundle, artefact(expected), photos)
    assert good.agreement is None and not good.problems("int8") and not good.problems("fp32")
    wrong = expected.copy()
    wrong[:, 2] += 0.5 * np.ptp(expected[:, 2])
    found = compare(bundle, artefact(wrong), photos)
    assert found.problems("int8") and found.problems("fp16") and "values differ" in found.problems("fp16")[0]
    small = dataclasses.replace(bundle, model=_scaled(bundle, 1e-4))  # small values are no reason to pass
    expected = logits_of(small, photos)
    assert compare(small, artefact(expected * 1.5), photos).problems("int8")


def _scaled(bundle: Bundle, factor: float) -> Any:
    model = vitrail.load(bundle.report.source).model
    assert isinstance(model.head, nn.Linear)
    with torch.no_grad():
        model.head.weight.mul_(factor)
        model.head.bias.mul_(factor)
    return model


def test_labels_of_a_multi_label_model_are_compared_at_its_thresholds(bundle: Bundle) -> None:
    thresholds = [0.2, 0.9, 0.5, 0.5, 0.5]
    bundle = dataclasses.replace(bundle, task="multilabel", provenance={"task": {"thresholds": thresholds}})
    photos = sample_photos(4)
    expected = logits_of(bundle, photos)
    limits = np.log(np.array(thresholds) / (1 - np.array(thresholds)))
    assert compare(bundle, artefact(expected), photos).agreement == 1.0
    flipped = expected.copy()
    flipped[:, 1] = np.where(expected[:, 1] >= limits[1], limits[1] - 1, limits[1] + 1)
    found = compare(bundle, artefact(flipped), photos)
    chosen, reference = flipped >= limits, expected >= limits
    assert found.agreement == pytest.approx((chosen & reference).sum() / (chosen | reference).sum())
    assert "of the labels that either model chooses, both choose" in " ".join(found.problems("int8"))
    none = compare(bundle, artefact(expected - 100), photos)
    assert none.agreement == 0 and none.problems("int8")
    silent = dataclasses.replace(bundle, model=_scaled(bundle, 0.0), provenance={"task": {"thresholds": [0.9] * 5}})
    neither = compare(silent, artefact(0 * expected), photos)
    assert neither.agreement is None and not neither.problems("fp32") and "no label chosen" in neither.describe()
    assert neither.problems("int8") == ["neither model chooses a label, so nothing is compared: give images that have labels"]


@pytest.mark.slow
def test_an_int8_model_that_never_chooses_a_label_fails(tmp_path: Path, bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """Few labels are true, so that nearly all decisions of a model that rejects every label are right."""
    photos = sample_photos()
    limits = np.sort(logits_of(bundle, photos), axis=0)[-2:].mean(axis=0)  # each label is chosen for one photo
    rare = {"task": {"thresholds": (1 / (1 + np.exp(-limits))).tolist()}}
    save(tmp_path / "rare", bundle.model, preprocess=bundle.preprocess, classes=bundle.classes, task="multilabel", provenance=rare)
    several = vitrail.load(tmp_path / "rare")
    broken = dataclasses.replace(several, model=copy.deepcopy(several.model))
    with torch.no_grad():
        broken.model.head.bias -= 100  # type: ignore[union-attr, operator]
    settings = ExportSettings(precision="int8")
    export_model(broken, tmp_path / "out", settings, images=photos, calibrate=photos[:4], force=True)
    with pytest.raises(SystemExit) as ended:
        main(["export", "verify", str(tmp_path / "out"), str(tmp_path / "rare")])
    assert ended.value.code == 1
    assert "of the labels that either model chooses, both choose 0.0%, needed is 95%" in capsys.readouterr().out


def test_an_int8_model_whose_output_does_not_depend_on_the_image_fails(bundle: Bundle) -> None:
    with torch.no_grad():
        bundle.model.head.bias[1] += 20  # every image is of this class
    photos = sample_photos(8)
    expected = logits_of(bundle, photos)
    constant = compare(bundle, artefact(np.repeat(expected[:1], 8, axis=0)), photos)
    assert constant.agreement == 1 and "same top class" in constant.problems("int8")[0]
    rounded = expected + 0.05 * (expected - expected.mean(axis=0))
    good = compare(bundle, artefact(rounded), photos)
    assert good.variation_error == pytest.approx(0.05, rel=1e-3) and not good.problems("int8")
    one = compare(bundle, artefact(expected[:1]), photos[:1])  # of one image nothing is known
    assert one.variation_error is None and not one.problems("int8")


def test_an_int8_model_that_chooses_the_same_labels_for_every_image_fails(bundle: Bundle) -> None:
    """As of a label that is true nearly always: equal decisions say as little as those of one class."""
    bundle = dataclasses.replace(bundle, task="multilabel")
    with torch.no_grad():
        bundle.model.head.bias.copy_(torch.tensor([50.0, -50.0, 50.0, -50.0, -50.0]))  # type: ignore[union-attr, operator]
    photos = sample_photos(8)
    expected = logits_of(bundle, photos)
    constant = compare(bundle, artefact(np.repeat(expected[:1], 8, axis=0)), photos)
    assert constant.agreement == 1 and "all images have the same labels" in constant.problems("int8")[0]
    rounded = expected + 0.05 * (expected - expected.mean(axis=0))
    assert not compare(bundle, artefact(rounded), photos).problems("int8")


def test_a_loss_of_accuracy_beyond_max_drop_is_a_problem(tmp_path: Path, bundle: Bundle) -> None:
    found = Comparison(100, "x", 1.0, 10.0, 0.97, accuracy=0.90, reference_accuracy=0.93)
    assert found.problems("int8") == [] and found.problems("int8", 0.03) == []
    assert found.problems("int8", 0.02) == ["accuracy falls by 3.0%, allowed is 2.0% (--max-drop)"]
    better = Comparison(100, "x", 1.0, 10.0, 0.97, accuracy=0.95, reference_accuracy=0.93)
    assert better.problems("int8", 0.0) == []


def test_a_max_drop_that_is_no_fraction_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["export", "x", str(tmp_path / "out")], ["export", "verify", str(tmp_path / "out"), "x"]):
        with pytest.raises(SystemExit):
            main([*command, "--max-drop", "5"])
        assert "--max-drop is 5.0; it must be a fraction" in capsys.readouterr().err


@dataclasses.dataclass
class Labelled:
    """A split with labels, as far as it is read here."""

    classes: tuple[str, ...]
    targets: list[int]
    task: str = "classify"

    def __len__(self) -> int:
        return len(self.targets)

    def payload(self, number: int) -> str:
        return f"image {number}"


def test_labels_are_mapped_by_name() -> None:
    split: Any = Labelled(("b", "a"), [0, 1, 1])
    assert images_of(split, 10, ("a", "b", "c"))[1] == [1, 0, 0]
    assert images_of(split, 10, ("a", "c"))[1] is None
    assert images_of(split, 2, None) == (["image 0", "image 2"], None)


@pytest.mark.slow
def test_norms_of_half_precision_compute_in_float32(tmp_path: Path, bundle: Bundle) -> None:
    with torch.no_grad():  # residuals whose squares do not fit into float16
        bundle.model.patches.bias += 3000.0 * torch.tensor([1.0, -1.0]).repeat(16)  # type: ignore[operator]
    export_model(bundle, tmp_path / "out", ExportSettings(precision="fp16"), images=sample_photos(3), force=True)
    logits = Artefact.open(tmp_path / "out")
    assert np.isfinite(logits.run(logits.prepare(sample_photos(2)))).all()
    graph = onnx.load(str(tmp_path / "out" / "model.onnx")).graph
    produced = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type == "LayerNormalization":
            cast = produced[node.input[0]]
            assert cast.op_type == "Cast" and cast.attribute[0].i == onnx.TensorProto.FLOAT


def test_half_precision_keeps_the_names_of_the_weights(bundle: Bundle) -> None:
    half = exported_module(bundle.model, torch.float16).model
    assert half.norm.norm.weight.dtype == torch.float32 and half.head.weight.dtype == torch.float16


@pytest.mark.slow
def test_weights_beyond_the_limit_of_protobuf_are_a_second_file(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.export.onnx_file._MAX_FILE", 10_000)
    comparison = export_model(bundle, tmp_path / "out", ExportSettings(), images=sample_photos(2))
    assert comparison.cosine == pytest.approx(1.0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.onnx", "model.onnx.data", "report.json"]
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["limits"]["max_drop"] == 0.01
    assert max(block_errors(bundle, Artefact.open(tmp_path / "out"), sample_photos(2)).values()) < 1e-5


@pytest.mark.slow
def test_weights_beyond_the_limit_of_protobuf_are_quantised_from_a_second_file_to_another(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime writes copies of the float model on the way, which do not fit into one file either."""
    monkeypatch.setattr("vitrail.export.onnx_file._MAX_FILE", 10_000)
    photos = sample_photos(8)
    comparison = export_model(bundle, tmp_path / "out", ExportSettings(precision="int8"), images=photos, calibrate=photos)
    assert comparison.cosine is not None and comparison.cosine > 0.99
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.onnx", "model.onnx.data", "report.json"]


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "bits"), [(1, 8), (1, 16), (3, 16)])
def test_grey_and_16_bit_models(tmp_path: Path, channels: int, bits: int) -> None:
    preprocess = Preprocess(size=(32, 32), channels=channels, bits=bits, mean=(0.5,) * channels, std=(0.5,) * channels)
    bundle = bundle_of(tmp_path, preprocess=preprocess, channels=channels, **TINY)
    export_model(bundle, tmp_path / "out", ExportSettings(), images=sample_photos(2))
    assert Artefact.open(tmp_path / "out").metadata["preprocess"]["bits"] == bits
    if bits == 16:
        with pytest.raises(VitrailError, match="without --pixels"):
            export_model(bundle, tmp_path / "pixels", ExportSettings(pixels=True))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [ExportSettings(), ExportSettings(pixels=True), ExportSettings(resize_in_graph=True)])
def test_a_resnet_takes_the_size_that_its_preprocessing_makes(tmp_path: Path, settings: ExportSettings) -> None:
    """Its config has a size, too, but a ResNet accepts others."""
    bundle = bundle_of(tmp_path, "BiT-R50x1", Preprocess(size=(64, 96)), image_size=32, layers=(1,))
    comparison = export_model(bundle, tmp_path / "out", settings, images=sample_photos(3, rectangles=True))
    assert comparison.max_difference < 2e-5 * comparison.spread and bundle.model.config.image_size == (32, 32)
    with pytest.raises(SystemExit) as ended:
        main(["export", "verify", str(tmp_path / "out"), str(tmp_path / "checkpoint")])
    assert not ended.value.code


@pytest.mark.slow
def test_a_resnet_exported_in_the_size_of_its_config_is_verified_in_that_size(tmp_path: Path) -> None:
    """Not in the size that the preprocessing of the checkpoint makes."""
    bundle = bundle_of(tmp_path, "BiT-R50x1", Preprocess(size=(48, 48)), image_size=64, layers=(1,))
    export_model(bundle, tmp_path / "out", ExportSettings(format="pt2", image_size=64), images=sample_photos(2))
    with pytest.raises(SystemExit) as ended:
        main(["export", "verify", str(tmp_path / "out"), str(tmp_path / "checkpoint")])
    assert not ended.value.code


def test_images_that_keep_their_aspect_ratio_do_not_fit_one_size(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, preprocess=Preprocess(size=(32, 32)).keep_aspect((8, 8)), any_size=True, **TINY)
    for settings in (ExportSettings(), ExportSettings(format="pt2", pixels=True), ExportSettings(resize_in_graph=True)):
        with pytest.raises(VitrailError, match=r"exported model takes one size\. Give another one with --preprocess"):
            export_model(bundle, tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_a_model_of_many_channels_needs_images_to_compare_on(tmp_path: Path) -> None:
    preprocess = Preprocess(size=(32, 32), channels=13, mean=(0.5,) * 13, std=(0.5,) * 13)
    bundle = bundle_of(tmp_path, preprocess=preprocess, channels=13, **TINY)
    with pytest.raises(VitrailError, match=r"photos have 3 channels, but the model takes 13\. Give images to compare on: --data"):
        export_model(bundle, tmp_path / "out", ExportSettings(format="pt2"))
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "out")])
    assert ended.value.code == 2 and not (tmp_path / "out").exists()
    arrays = list(np.random.default_rng(0).integers(0, 256, (3, 40, 50, 13), np.uint8))
    assert export_model(bundle, tmp_path / "out", ExportSettings(format="pt2"), images=arrays).images == 3


def test_what_cannot_be_exported_is_refused(tmp_path: Path, bundle: Bundle) -> None:
    with pytest.raises(VitrailError, match="have no effect on fp32"):
        export_model(bundle, tmp_path / "out", calibrate=sample_photos(1))
    with torch.no_grad():
        bundle.model.head.weight.zero_()  # type: ignore[union-attr, operator]
    with pytest.raises(VitrailError, match="only a backbone"):
        export_model(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_source_that_looks_like_json_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "[1]"
    folder.mkdir()
    bundle = bundle_of(folder, **TINY)
    bundle.report.source = "[1]/checkpoint"
    export_model(bundle, tmp_path / "out", images=sample_photos(1))
    assert Artefact.open(tmp_path / "out").metadata["source"] == "[1]/checkpoint"


@pytest.mark.slow
def test_int8_leaves_both_heads_of_a_distilled_model(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, **TINY, distill_token=True)
    export_model(bundle, tmp_path / "out", images=sample_photos(2))
    graph = onnx.load(str(tmp_path / "out" / "model.onnx")).graph
    assert len(layers_to_quantise(graph)) == 2 * 4
    multiplied = {node.name: node for node in graph.node if node.op_type in ("Gemm", "MatMul", "Conv")}
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for name in layers_to_quantise(graph):
        assert all(5 not in shapes.get(given, ()) for given in multiplied[name].input)  # the heads have five outputs


@pytest.mark.slow
def test_thresholds_of_a_multi_label_model_are_stored(tmp_path: Path, bundle: Bundle) -> None:
    thresholds = [0.2, 0.9, 0.5, 0.5, 0.5]
    several = dataclasses.replace(bundle, task="multilabel", provenance={"task": {"thresholds": thresholds}})
    export_model(several, tmp_path / "out", ExportSettings(format="pt2"), images=sample_photos(2))
    assert Artefact.open(tmp_path / "out").metadata["thresholds"] == thresholds
