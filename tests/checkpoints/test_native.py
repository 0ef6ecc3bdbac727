"""Vitrail's own folder: everything round-trips, and every change is detected."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from tests.checkpoints.small_models import KINDS, SMALL, assert_same_model, bundle_of, images_for, random_model
from vitrail.checkpoints.golden import check as golden_check
from vitrail.checkpoints.golden import golden_image
from vitrail.checkpoints.native import checksum
from vitrail.data.preprocess import preset
from vitrail.errors import VitrailError
from vitrail.models import ViTConfig, build_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    preprocess = preset("google-vit", size=(32, 32))
    provenance = {"run": "r1", "epoch": 3}
    vitrail.save(
        tmp_path / "ckpt", random_model(KINDS["plain"]), preprocess=preprocess, classes=tuple("abcde"), provenance=provenance
    )
    return tmp_path / "ckpt"


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for path, value in values.items():
        *parents, last = path.split("__")
        inner = config
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    (folder / "config.json").write_text(json.dumps(config))


def test_everything_round_trips(folder: Path) -> None:
    bundle = vitrail.load(folder)
    assert bundle.model.config == KINDS["plain"]
    assert bundle.preprocess == preset("google-vit", size=(32, 32))
    assert (bundle.classes, bundle.task, bundle.provenance) == (tuple("abcde"), "classify", {"run": "r1", "epoch": 3})
    assert sorted(item.name for item in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert not bundle.model.training
    assert_same_model(bundle.model, random_model(KINDS["plain"]), KINDS["plain"])


def test_training_loaded_weights_does_not_change_the_file(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    model = vitrail.load(folder).model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images_for(KINDS["plain"])).sum().backward()
    optimizer.step()
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in model.parameters())
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_run_folder_and_a_weight_file_are_valid_references(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copytree(folder, tmp_path / "run" / "model")
    (tmp_path / "run" / "config.json").write_text('{"recipe": "digits"}')
    for ref in (tmp_path / "run", folder / "model.safetensors", str(folder)):
        assert vitrail.load(ref).classes == tuple("abcde")


@pytest.mark.parametrize("kind", ["plain", "hybrid", "bit"])
def test_large_weights_are_sharded_in_the_hubs_layout(kind: str, tmp_path: Path) -> None:
    model = random_model(KINDS[kind])
    vitrail.save(tmp_path / "big", model, shard_size=20_000)
    files = sorted(item.name for item in (tmp_path / "big").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "big" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    again = vitrail.load(tmp_path / "big", verify="full").model
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    (tmp_path / "big" / files[1]).unlink()
    with pytest.raises(VitrailError, match="There is no file"):
        vitrail.load(tmp_path / "big")


@pytest.mark.parametrize("verify", ["quick", "full"])
@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_any_flipped_bit_is_detected(folder: Path, verify: Any, bit: int) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    word = start + 4 * ((len(content) - start) // 8)
    content[word + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(VitrailError, match=r"not those that were saved|SHA-256"):
        vitrail.load(folder, verify=verify)


def test_golden_outputs_and_sha256_detect_what_the_checksum_cannot(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["head.weight"] = tensors["head.weight"].flip(0)  # the same values in another order
    save_file(dict(tensors), path)
    with pytest.raises(VitrailError, match="does not compute the same outputs"):
        vitrail.load(folder)
    with pytest.raises(VitrailError, match="SHA-256"):
        vitrail.load(folder, verify="full")
    assert vitrail.load(folder, verify="none").classes == tuple("abcde")


@pytest.mark.parametrize(
    ("field", "value"),
    [("gelu", "erf"), ("norm_eps", 1e-3), ("heads", 2), ("pooling", "mean"), ("patch", [4, 16])],
)
def test_a_config_that_describes_another_function_is_detected(folder: Path, field: str, value: Any) -> None:
    change(folder, **{f"model__{field}": value})
    with pytest.raises(VitrailError, match=r"does not compute the same outputs|is 32×3×8×8, but the other tensors need"):
        vitrail.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__width": 64}, "belong to different models"),
        ({"model__depth": 4}, r"Missing from the file \(12\)"),
        ({"model__outputs": 6}, "but the other tensors need"),
        ({"model__wings": 2}, "no field 'wings'"),
        ({"model__width": 2**62}, "multiple|Cannot read|tensors need"),
        ({"model__width": "wide"}, "whole numbers"),
        ({"model": None}, "'model' is missing or has a wrong type"),
        ({"version": 99}, "Update Vitrail"),
        ({"classes": ["a"]}, "5 outputs, but the list of classes has 1 name"),
        ({"task": "dream"}, "it must be one of classify"),
        ({"preprocess__size": [0, 0]}, "at least 1"),
        ({"golden": {}}, "no golden output"),
        ({"golden__quick__logits": ["x"] * 5}, "do not fit this model"),
        ({"weights__checksum": "0"}, "not those that were saved"),
        ({"weights": 3}, "'weights' is missing"),
        ({"weights__load_dtype": "int8"}, "load_dtype is 'int8'"),
    ],
)
def test_a_corrupted_config_gives_a_clear_error(folder: Path, changes: dict[str, Any], message: str) -> None:
    change(folder, **changes)
    with pytest.raises(VitrailError, match=message):
        vitrail.load(folder)


def test_an_index_cannot_point_outside_the_folder(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"head.bias": "../../secret.safetensors"}}))
    with pytest.raises(VitrailError, match="does not list safetensors files of this folder"):
        vitrail.load(folder)


def test_only_checkpoints_are_replaced(folder: Path, tmp_path: Path) -> None:
    vitrail.save(folder, random_model(KINDS["plain"], seed=3))
    assert vitrail.load(folder).classes is None
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "thesis.tex").write_text("text")
    with pytest.raises(VitrailError, match="It is not changed"):
        vitrail.save(folder, random_model(KINDS["plain"]))
    assert (folder / "thesis.tex").read_text() == "text"
    with pytest.raises(VitrailError, match="is a file"):
        vitrail.save(folder / "thesis.tex", random_model(KINDS["plain"]))


def test_invalid_saves_are_rejected(tmp_path: Path) -> None:
    model = random_model(KINDS["plain"])
    with pytest.raises(VitrailError, match="5 outputs, but the list of classes has 3 names"):
        vitrail.save(tmp_path / "x", model, classes=("a", "b", "c"))
    with pytest.raises(VitrailError, match="plain JSON values"):
        vitrail.save(tmp_path / "x", model, provenance={"model": model})
    with pytest.raises(VitrailError, match="only Vitrail's models"):
        vitrail.save(tmp_path / "x", torch.nn.Linear(2, 2))
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(VitrailError, match="not finite"):
        vitrail.save(tmp_path / "x", model)
    assert list(tmp_path.iterdir()) == []


class Wrapper(torch.nn.Module):
    """Wrap a model as DistributedDataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.slow
def test_wrapped_and_compiled_models_are_saved_without_prefixes(tmp_path: Path) -> None:
    plain = random_model(KINDS["plain"])
    for wrapped in (Wrapper(plain), torch.compile(plain), Wrapper(torch.compile(plain))):  # type: ignore[arg-type]
        vitrail.save(tmp_path / "x", wrapped)
        again = vitrail.load(tmp_path / "x").model.state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in plain.state_dict().items())


def test_saving_does_not_change_the_model(tmp_path: Path) -> None:
    model = random_model(KINDS["plain"]).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    vitrail.save(tmp_path / "x", model)
    assert model.training and all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_fields_can_be_changed_on_loading(folder: Path) -> None:
    bundle = vitrail.load(folder, dropout=0.25, stochastic_depth=0.1)
    assert (bundle.model.config.dropout, bundle.model.config.stochastic_depth) == (0.25, 0.1)  # type: ignore[union-attr]
    assert "dropout=0.25" in bundle.report.notes[0]
    with pytest.raises(VitrailError, match="no field 'dropuot'"):
        vitrail.load(folder, dropuot=0.25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_its_own_golden_check(dtype: torch.dtype, tmp_path: Path) -> None:
    vitrail.save(tmp_path / "x", random_model(KINDS["plain"], dtype=dtype))
    assert vitrail.load(tmp_path / "x", verify="full").model.norm.weight.dtype is dtype


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_stored_in_half_precision_are_loaded_in_the_models_dtype(stored: torch.dtype, tmp_path: Path) -> None:
    model = random_model(KINDS["plain"])
    vitrail.save(tmp_path / "x", model, store_dtype=stored, read_back=True)
    assert {tensor.dtype for tensor in load_file(tmp_path / "x" / "model.safetensors").values()} == {stored}
    again = vitrail.load(tmp_path / "x", verify="full").model
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(stored).float())
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    logits = config["golden"]["full"]["logits"]
    config["golden"]["full"]["logits"] = [value + 1e-3 * max(map(abs, logits)) for value in logits]
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(VitrailError, match="does not compute the same outputs"):  # the tolerance is that of float32
        vitrail.load(tmp_path / "x", verify="full")


def test_weights_too_large_for_the_stored_dtype_are_rejected(tmp_path: Path) -> None:
    model = random_model(KINDS["plain"])
    with torch.no_grad():
        model.norm.weight[0] = 1e6
    with pytest.raises(VitrailError, match=r"norm\.weight has values that are too large for float16"):
        vitrail.save(tmp_path / "x", model, store_dtype=torch.float16)
    with pytest.raises(VitrailError, match=r"cannot be stored as torch\.int8"):
        vitrail.save(tmp_path / "x", model, store_dtype=torch.int8)


def test_others_can_read_what_was_saved(folder: Path) -> None:
    (folder.parent / "plain").touch()
    expected = (folder.parent / "plain").stat().st_mode
    assert {file.stat().st_mode for file in folder.iterdir()} == {expected}


def test_the_golden_image_never_changes() -> None:
    image = golden_image(3, (2, 2)).flatten()
    expected = []
    for i in range(12):
        mixed = (i + 1) * 2654435761 % 2**32
        mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
        expected.append(mixed / 2**31 - 1)
    torch.testing.assert_close(image, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0)
    large = golden_image(3, (64, 64))
    assert abs(float(large.mean())) < 0.02 and abs(float(large.std()) - 3**-0.5) < 0.02


def test_the_checksum_depends_on_names_shapes_and_values() -> None:
    state = {"a": torch.randn(4, 3), "b": torch.randn(5)}
    first = checksum(state)
    assert checksum(dict(reversed(state.items()))) == first
    assert checksum({"a": state["a"].reshape(3, 4), "b": state["b"]}) != first
    assert checksum({"c": state["a"], "b": state["b"]}) != first
    state["b"][2] += 1e-6
    assert checksum(state) != first


def test_with_a_zero_head_the_golden_pre_logits_detect_changes(tmp_path: Path) -> None:
    config = ViTConfig(name="small", **SMALL)
    bundle = bundle_of(config)
    bundle.model.replace_head(7)
    vitrail.save(tmp_path / "x", bundle.model)
    change(tmp_path / "x", model__gelu="erf")
    with pytest.raises(VitrailError, match="its pre_logits differ"):
        vitrail.load(tmp_path / "x")


VERSION_1 = """
{
  "format": "vitrail", "version": 1,
  "model": {
    "family": "vit", "name": "tiny", "outputs": 2, "image_size": [4, 4], "channels": 3, "width": 4, "depth": 1, "heads": 2,
    "mlp": 4, "patch": [2, 2], "resnet": null, "gelu": "tanh", "norm_eps": 1e-06, "qkv_bias": true, "layer_scale": null,
    "attention": "full",
    "class_token": true, "distill_token": false, "registers": 0, "position": "learned", "position_at": "input",
    "position_prefix": true, "position_resize": "reference", "position_std": 0.02, "pooling": "class",
    "final_norm": "before-pool", "pre_logits": null, "head_bias": 0.0, "dropout": 0.0, "attention_dropout": 0.0,
    "stochastic_depth": 0.0
  },
  "preprocess": {
    "size": [4, 4], "resize": "square", "resize_to": null, "interpolation": "bilinear", "antialias": false, "rounding": "none",
    "geometry": "tensorflow", "pad": false, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "channels": 3, "bits": 8,
    "exif": true, "name": "google-vit"
  },
  "classes": ["a", "b"], "task": "classify",
  "provenance": {"recipe": "digits", "task": {"kind": "classify", "activation": "softmax"}},
  "golden": {
    "quick": {"pre_logits": [-0.38746125, 0.9887287, 2.4767227, 4.0765181], "logits": [15.531122, 17.38225]},
    "full": {"pre_logits": [-0.38746053, 0.98872894, 2.4767225, 4.0765185], "logits": [15.531126, 17.382254]}
  },
  "weights": {"parameters": 230, "dtype": "float32", "checksum": "2ee2cb5ce3f1ccecebf1947e79cc78d7", "sha256": {}}
}
"""


def test_a_folder_of_version_1_is_read(tmp_path: Path) -> None:
    """The literal config.json of an older Vitrail, which has no `init`; the weights are the numbers it was saved with."""
    model = build_model(ViTConfig(name="tiny", width=4, depth=1, heads=2, mlp=4, patch=(2, 2), image_size=(4, 4), outputs=2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = (torch.arange(parameter.numel()) % 17 - 8) / 16 + number / 8
            parameter.copy_(values.reshape(parameter.shape))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(VERSION_1)
    bundle = vitrail.load(tmp_path)
    assert (bundle.classes, bundle.task_info) == (("a", "b"), {"kind": "classify", "activation": "softmax"})
    assert bundle.preprocess == preset("google-vit+exif", size=(4, 4))  # as it was trained
    golden_check(bundle.model, json.loads(VERSION_1)["golden"], "version 1", full=True)
