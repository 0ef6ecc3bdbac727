"""Images of any size are resized and cropped in the exported graph as `Preprocess` does it; blocks that differ are named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import ExifTags, Image

import vitrail
from tests.export.test_export import TINY, bundle_of
from vitrail.checkpoints import Bundle
from vitrail.checkpoints.native import save
from vitrail.cli import main
from vitrail.data.preprocess import Preprocess, preset
from vitrail.errors import VitrailError
from vitrail.export import Artefact, ExportSettings, export_model
from vitrail.export.blocks import block_errors, describe
from vitrail.export.graph_preprocess import GraphPreprocess
from vitrail.export.verify import sample_photos

SIZES = [(427, 640), (33, 35), (32, 32), (16, 16), (1, 50), (50, 1), (1, 1), (31, 200), (200, 31), (37, 37), (128, 96)]
POLICIES: list[dict[str, Any]] = [
    {"resize": "square"},
    {"resize": "square", "resize_to": 37},
    {"resize": "square", "pad": True},
    {"resize": "short-side", "resize_to": 37},
    {"resize": "short-side", "resize_to": 37, "size": (32, 24)},
]


def images() -> Iterator[np.ndarray[Any, Any]]:
    """Yield a photo and noise in every size: noise has values at every edge of rounding."""
    generator = np.random.default_rng(0)
    photo = sample_photos(1)[0]
    for height, width in SIZES:
        yield np.array(photo.resize((width, height), Image.Resampling.BICUBIC))
        yield generator.integers(0, 256, (height, width, 3)).astype(np.uint8)


def differences(preprocess: Preprocess) -> np.ndarray[Any, Any]:
    graph, found = GraphPreprocess(preprocess), []
    for image in images():
        pixels = graph(torch.from_numpy(image)[None])[0].permute(1, 2, 0).numpy()
        found.append(np.abs(pixels - preprocess.pixels(image).astype(np.float32)).ravel())
    return np.concatenate(found)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area", "lanczos"])
@pytest.mark.parametrize("geometry", ["torchvision", "tensorflow"])
def test_pixels_are_those_of_pillow_bit_for_bit(interpolation: Any, geometry: Any) -> None:
    for policy in POLICIES:
        values = {"size": (32, 32), "interpolation": interpolation, "geometry": geometry, **policy}
        assert differences(Preprocess(**values)).max() == 0.0, policy
        assert differences(Preprocess(**values, rounding="none")).max() < 1e-4, policy


@pytest.mark.parametrize("name", ["google-vit", "big-vision", "timm", "imagenet", "deit", "cifar"])
@pytest.mark.parametrize("size", [32, (32, 48)])
def test_published_preprocessings_are_the_same(name: str, size: Any) -> None:
    # Google's bilinear resize is torch's float32 kernel, whose order of operations is its own.
    assert differences(preset(name, size=size)).max() <= (0.01 if name == "google-vit" else 0.0)


def test_policies_of_tensorflow_differ_by_one_level_at_the_edge_of_rounding() -> None:
    for policy, interpolation, rounding in product(POLICIES, ("bilinear", "bicubic", "area", "nearest"), ("nearest", "truncate")):
        values = {"size": (32, 32), "interpolation": interpolation, "rounding": rounding, "antialias": False, **policy}
        found = differences(Preprocess(**values))
        assert found.max() <= 1.0 and (found > 0.01).mean() < 1e-3, values


def test_images_are_only_cropped_or_padded_where_nothing_is_resized() -> None:
    assert differences(Preprocess(size=(32, 32), resize="none", pad=True, mean=(0.2, 0.4, 0.6))).max() == 0.0
    graph = GraphPreprocess(Preprocess(size=(32, 32), resize="none"))
    assert torch.equal(graph(torch.ones(1, 33, 35, 3, dtype=torch.uint8)), torch.ones(1, 3, 32, 32))
    with pytest.raises(IndexError):
        graph(torch.ones(1, 31, 35, 3, dtype=torch.uint8))


def test_what_cannot_be_resized_in_the_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match="nearest interpolation cannot be computed in the graph; export without --resize"):
        GraphPreprocess(Preprocess(size=(32, 32), interpolation="nearest"))
    bundle = bundle_of(tmp_path, preprocess=Preprocess(size=(32, 32), bits=16), **TINY)
    with pytest.raises(VitrailError, match="Pixels of 16 bits cannot be normalised in the graph; export without --resize-in-graph"):
        export_model(bundle, tmp_path / "out", ExportSettings(resize_in_graph=True))


@pytest.mark.slow
def test_pixels_keep_a_padding_whose_colour_is_no_integer(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, preprocess=Preprocess(size=(32, 32), pad=True), **TINY)
    photos = sample_photos(4, rectangles=True)
    found = export_model(bundle, tmp_path / "out", ExportSettings(pixels=True), images=photos)
    assert found.max_difference < 1e-5 and Artefact.open(tmp_path / "out").prepare(photos).dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "format", "preprocess"),
    [
        ("ViT-Ti/16", TINY, "onnx", preset("timm", size=32)),
        ("ViT-Ti/16", {**TINY, "image_size": (32, 48)}, "onnx", preset("google-vit", size=(32, 48))),
        ("ViT-Ti/16", TINY, "pt2", preset("big-vision", size=32)),
        ("R50+ViT-B/16", {"width": 32, "depth": 1, "heads": 2, "mlp": 64, "image_size": 64, "layers": (1, 1, 1)}, "onnx", None),
        ("BiT-R50x1", {"image_size": 64, "layers": (1, 1)}, "onnx", preset("imagenet", size=64)),
        ("BiT-R50x1", {"image_size": 64, "layers": (1, 1)}, "pt2", Preprocess(size=(64, 64), pad=True)),
    ],
)
def test_an_exported_model_takes_images_of_any_size(
    tmp_path: Path, name: str, options: dict[str, Any], format: Any, preprocess: Preprocess | None
) -> None:
    bundle = bundle_of(tmp_path, name, preprocess, **options)
    export_model(bundle, tmp_path / "out", ExportSettings(format=format, resize_in_graph=True))
    artefact = Artefact.open(tmp_path / "out")
    given = list(images())
    with torch.no_grad():
        expected = bundle.model(torch.stack([bundle.stored_preprocess()(image) for image in given])).numpy()
    found = artefact.logits(given)  # a photo and noise of one size are one batch
    assert np.abs(found - expected).max() < 1e-4 * max(1.0, np.ptp(expected))
    assert np.abs(artefact.run(artefact.prepare(given[:1])) - expected[:1]).max() < 1e-4 * max(1.0, np.ptp(expected))
    assert artefact.prepare(given[:2]).dtype == np.uint8 and artefact.metadata["layout"] == "batch, height, width, channel"
    with pytest.raises(VitrailError, match=r"differ in size.*one by one, or call logits"):
        artefact.prepare(given)
    assert artefact.prepare([Image.fromarray(given[0]).convert("L")]).shape[-1] == 3  # grey is repeated, as in every command


@pytest.mark.slow
def test_int8_leaves_the_resize_in_float64(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, preprocess=preset("timm", size=32), **TINY)
    photos = sample_photos(6, rectangles=True)
    settings = ExportSettings(precision="int8", resize_in_graph=True)
    comparison = export_model(bundle, tmp_path / "out", settings, calibrate=photos, force=True)
    assert 0 < comparison.max_difference < 0.2 * comparison.spread
    graph = onnx.load(str(tmp_path / "out" / "model.onnx")).graph
    quantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    assert sum(node.op_type == "MatMul" and set(node.input) <= quantised for node in graph.node) == 2 * 4
    found = block_errors(bundle, Artefact.open(tmp_path / "out"), photos)
    assert list(found) == ["patches", "blocks.0", "blocks.1"] and found["patches"] < 1e-5 < found["blocks.1"] < 0.2


@pytest.mark.slow
def test_the_documented_lines_for_a_graph_that_resizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run docs/export.md's lines for onnxruntime, NumPy and Pillow on a rectangle that its EXIF data turns."""
    bundle = bundle_of(tmp_path, preprocess=Preprocess(size=(32, 32), resize="short-side", resize_to=37), **TINY)
    monkeypatch.chdir(tmp_path)
    export_model(bundle, "pets-any-size", ExportSettings(resize_in_graph=True))
    photo, exif = sample_photos(1)[0].resize((161, 107)), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo.save("cat.jpg", exif=exif)
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pets-any-size" in block]
    found: dict[str, Any] = {}
    exec(code, found)
    expected = bundle.model(bundle.stored_preprocess()("cat.jpg")[None]).detach().numpy()[0]
    np.testing.assert_allclose(found["logits"], expected, atol=1e-4)


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module", params=["onnx", "pt2"])
def differing(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Bundle]:
    """Return an exported model, and a bundle with other weights in its second block."""
    folder = tmp_path_factory.mktemp(request.param)
    bundle = bundle_of(folder, **{**TINY, "depth": 3})
    export_model(bundle, folder / "out", ExportSettings(format=request.param), images=sample_photos(2))
    with torch.no_grad():
        bundle.model.blocks[1].mlp.up.weight *= 1.5  # type: ignore[union-attr, index]
    save(folder / "other", bundle.model, preprocess=bundle.stored_preprocess(), classes=bundle.classes)
    return folder, vitrail.load(folder / "other")


@pytest.mark.slow
def test_the_block_that_differs_is_named(differing: tuple[Path, Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = differing
    found = block_errors(other, Artefact.open(folder / "out"), sample_photos(3))
    assert list(found) == ["patches", "blocks.0", "blocks.1", "blocks.2"]
    assert max(found["patches"], found["blocks.0"]) < 1e-5 < 1e-3 < found["blocks.1"]
    assert "is blocks.1 (" in describe(found, "fp32")
    command = ["export", "verify", str(folder / "out"), str(folder / "other")]
    assert status(*command) == 1
    shown = capsys.readouterr().out
    assert "differs by more than 0.0001, relative to its norm, is blocks.1 (" in shown and "blocks.0" not in shown
    assert status(*command, "--json") == 1
    assert list(json.loads(capsys.readouterr().out)["blocks"]) == list(found)
    assert status(*command[:3], str(folder / "checkpoint"), "--blocks") == 0
    shown = capsys.readouterr().out
    assert "blocks.2: " in shown and "outputs of 4 blocks differ by up to" in shown


def test_where_models_differ_in_a_sentence() -> None:
    assert "cannot be read from the file" in describe({}, "fp32")
    found = {"patches": 0.0, "blocks.0": 2e-4, "blocks.1": 0.5}
    assert describe(found, "fp32") == (
        "The first block whose output differs by more than 0.0001, relative to its norm, is blocks.0 (0.0002); "
        "the largest difference is that of blocks.1 (0.5)."
    )
    assert describe(found, "int8").endswith("by more than 0.1, relative to its norm, is blocks.1 (0.5).")
    assert "is blocks.1 (nan)" in describe({**found, "blocks.0": 0.0, "blocks.1": float("nan")}, "fp16")
