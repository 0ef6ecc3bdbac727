"""Different names of the same weights, across versions and libraries."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from tests.checkpoints.small_models import KINDS, SUFFIX, bundle_of, needed_fields
from vitrail.checkpoints import write
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.loading import load
from vitrail.errors import VitrailError

Arrays = dict[str, np.ndarray]


def arrays_of(kind: str, name: str, folder: Path) -> tuple[Bundle, Arrays]:
    bundle = bundle_of(KINDS[kind])
    write(bundle, folder / "canonical.npz", name)
    return bundle, dict(np.load(folder / "canonical.npz"))


def expect(bundle: Bundle, path: Path | str, note: str = "") -> None:
    again = load(path, **needed_fields(bundle.model.config))
    for key, tensor in bundle.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[key]), key
    assert note in " ".join(again.report.notes)


def renamed(arrays: Arrays, *changes: tuple[str, str]) -> Arrays:
    for pattern, replacement in changes:
        arrays = {re.sub(pattern, replacement, name): array for name, array in arrays.items()}
    return arrays


TO_LINEN = [("LayerNorm_2", "LayerNorm_1"), ("Attention_1", "Attention_0"), ("MlpBlock_3", "MlpBlock_0")]


@pytest.mark.parametrize("kind", ["plain", "hybrid", "pre-logits"])
def test_google_with_linens_module_numbers(kind: str, tmp_path: Path) -> None:
    bundle, arrays = arrays_of(kind, "google", tmp_path)
    np.savez(tmp_path / "linen.npz", **renamed(arrays, *TO_LINEN))
    expect(bundle, tmp_path / "linen.npz", "Linen")


def test_group_norms_stored_with_four_dimensions(tmp_path: Path) -> None:
    bundle, arrays = arrays_of("hybrid", "google", tmp_path)
    four = {name: array[None, None, None] if re.search("gn(_root|_proj|[123])/", name) else array for name, array in arrays.items()}
    assert any(array.ndim == 4 and name.endswith("scale") for name, array in four.items())
    np.savez(tmp_path / "four.npz", **four)
    expect(bundle, tmp_path / "four.npz")


@pytest.mark.parametrize("prefix", ["params/", "opt/target/", ""])
def test_prefixes_of_training_checkpoints(prefix: str, tmp_path: Path) -> None:
    bundle, arrays = arrays_of("free-class", "big-vision", tmp_path)
    changed = renamed(arrays, ("^params/", prefix))
    if prefix:
        changed |= {"opt/state/step": np.array(17), "extra/rng": np.zeros(2, np.uint32)}
    np.savez(tmp_path / "p.npz", **changed)
    expect(bundle, tmp_path / "p.npz", "stripped" if prefix else "")
    dropped = load(tmp_path / "p.npz").report.dropped
    assert sorted(name for name, _ in dropped) == (["extra/rng", "opt/state/step"] if prefix else [])


def test_one_of_two_towers(tmp_path: Path) -> None:
    bundle, arrays = arrays_of("map", "big-vision", tmp_path)
    both = renamed(arrays, ("^params/", "params/img/"))
    both |= {"params/txt/Embed_0/embedding": np.zeros((9, 4), np.float32), "params/t": np.ones(1)}
    np.savez(tmp_path / "two.npz", **both)
    expect(bundle, f"{tmp_path / 'two.npz'}:img")
    with pytest.raises(VitrailError, match=r"two\.npz:img"):
        load(tmp_path / "two.npz")
    with pytest.raises(VitrailError, match="no part 'image'; it has img, t, txt"):
        load(f"{tmp_path / 'two.npz'}:image")


@pytest.mark.parametrize("kind", ["plain", "map", "sincos", "gap"])
def test_blocks_stacked_by_scan(kind: str, tmp_path: Path) -> None:
    bundle, arrays = arrays_of(kind, "big-vision", tmp_path)
    depth = bundle.model.config.depth  # type: ignore[union-attr]
    stacked = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for name in [name for name in arrays if "encoderblock_0/" in name]:
        layers = [arrays[name.replace("encoderblock_0", f"encoderblock_{i}")] for i in range(depth)]
        stacked[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    np.savez(tmp_path / "scan.npz", **stacked)
    expect(bundle, tmp_path / "scan.npz", "stacked by scan")


def test_older_names_of_the_position_embedding(tmp_path: Path) -> None:
    bundle, arrays = arrays_of("plain", "big-vision", tmp_path)
    for older in ("Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding"):
        np.savez(tmp_path / "old.npz", **renamed(arrays, ("params/pos_embedding", f"params/{older}")))
        expect(bundle, tmp_path / "old.npz")


def test_older_names_of_attention_pooling(tmp_path: Path) -> None:
    bundle, arrays = arrays_of("map", "big-vision", tmp_path)
    np.savez(tmp_path / "old.npz", **renamed(arrays, ("MAPHead_0/", "")))
    expect(bundle, tmp_path / "old.npz", "attention-pooling")


def test_bfloat16_as_void(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["map"], dtype=torch.bfloat16)
    write(bundle, tmp_path / "bf16.npz", "big-vision")
    assert np.load(tmp_path / "bf16.npz")["params/head/kernel"].dtype == np.dtype("V2")
    expect(bundle, tmp_path / "bf16.npz")


def test_fortran_order_and_big_endian(tmp_path: Path) -> None:
    bundle, arrays = arrays_of("plain", "google", tmp_path)
    np.savez_compressed(tmp_path / "f.npz", **{name: np.asfortranarray(array) for name, array in arrays.items()})
    expect(bundle, tmp_path / "f.npz")
    np.savez(tmp_path / "b.npz", **{name: array.astype(">f4") for name, array in arrays.items()})
    expect(bundle, tmp_path / "b.npz")


def number_convolutions(arrays: Arrays) -> Arrays:
    return {
        name.replace("standardized_conv2d/", f"standardized_conv2d_{i}/"): array for i, (name, array) in enumerate(arrays.items())
    }


def as_big_vision_bit(arrays: Arrays) -> Arrays:
    changed = {}
    letters = {"a": 1, "b": 2, "c": 3}
    for name, array in arrays.items():
        name = name.removeprefix("resnet/").replace("root_block/standardized_conv2d", "root_block/conv_root")
        name = name.replace("/a/proj/standardized_conv2d/", "/conv_proj/")
        name = re.sub(r"/([abc])/standardized_conv2d/", lambda m: f"/conv{letters[m[1]]}/", name)
        name = re.sub(r"/([abc])/group_norm/", lambda m: f"/gn{letters[m[1]]}/", name)
        name = re.sub(r"^group_norm/", "norm-pre-head/", name).replace("head/conv2d/", "head/")
        name = name.replace("/gamma", "/scale").replace("/beta", "/bias")
        if "gn" in name or "norm-pre-head" in name:
            array = array[None, None, None]
        changed[name] = array[0, 0] if name == "head/kernel" else array
    return changed


@pytest.mark.parametrize("variant", [number_convolutions, as_big_vision_bit])
def test_name_variants_of_bit(variant: Callable[[Arrays], Arrays], tmp_path: Path) -> None:
    bundle, arrays = arrays_of("bit", "bit", tmp_path)
    changed = variant(arrays)
    assert changed.keys() != arrays.keys()
    np.savez(tmp_path / "other.npz", **changed)
    expect(bundle, tmp_path / "other.npz")
    fill = load(tmp_path / "other.npz", image_size=64).model.config.resnet.pool_fill  # type: ignore[union-attr]
    assert fill == ("-inf" if variant is as_big_vision_bit else "zero")


@pytest.mark.parametrize("name", ["bit", "timm"])
def test_half_width_resnets_are_read(name: str, tmp_path: Path) -> None:
    config = KINDS["bit"].replace(multiplier=0.5)
    bundle = bundle_of(config)
    path = tmp_path / f"half{SUFFIX[name]}"
    write(bundle, path, name)
    again = load(path, image_size=64)
    assert again.model.config.name == "BiT-R11x0.5" and again.model.root.weight.shape[0] == 32  # type: ignore[union-attr]
    expect(bundle, path)
    vitrail.save(tmp_path / "own", again.model)
    assert vitrail.load(tmp_path / "own").model.config == again.model.config


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_wrapper_prefixes_are_stripped_and_noted(prefix: str, name: str, tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    write(bundle, tmp_path / "a.safetensors", name)
    save_file({f"{prefix}{key}": value for key, value in load_file(tmp_path / "a.safetensors").items()}, tmp_path / "b.safetensors")
    expect(bundle, tmp_path / "b.safetensors", "were stripped")


def test_blocks_compiled_one_by_one(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    write(bundle, tmp_path / "a.safetensors", "timm")
    inner = {
        re.sub(r"^(blocks\.\d+)\.", r"\1._orig_mod.", key): value for key, value in load_file(tmp_path / "a.safetensors").items()
    }
    save_file(inner, tmp_path / "b.safetensors")
    expect(bundle, tmp_path / "b.safetensors", "were stripped")


def test_training_checkpoints_of_timm(tmp_path: Path) -> None:
    bundle, other = bundle_of(KINDS["plain"]), bundle_of(KINDS["plain"], seed=5)
    write(bundle, tmp_path / "a.safetensors", "timm")
    write(other, tmp_path / "b.safetensors", "timm")
    content = {
        "state_dict": load_file(tmp_path / "a.safetensors"),
        "state_dict_ema": load_file(tmp_path / "b.safetensors"),
        "epoch": 3,
    }
    torch.save(content, tmp_path / "last.pth")
    expect(bundle, tmp_path / "last.pth", "loaded key 'state_dict'")
    expect(other, f"{tmp_path / 'last.pth'}:state_dict_ema")


def test_older_names_of_layer_scale_and_of_torchvisions_mlp(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["layer-scale"])
    write(bundle, tmp_path / "a.safetensors", "timm")
    tensors = load_file(tmp_path / "a.safetensors")
    old = {key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value for key, value in tensors.items()}
    save_file(old, tmp_path / "b.safetensors")
    expect(bundle, tmp_path / "b.safetensors", "layer scale")
    bundle = bundle_of(KINDS["plain"])
    write(bundle, tmp_path / "c.safetensors", "torchvision")
    tensors = load_file(tmp_path / "c.safetensors")
    old = {key.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): value for key, value in tensors.items()}
    save_file(old, tmp_path / "d.safetensors")
    expect(bundle, tmp_path / "d.safetensors", "older names")


def test_an_unused_pooler_is_dropped_with_a_reason(tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    write(bundle, tmp_path / "hf", "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path) | {"vit.pooler.dense.weight": torch.ones(32, 32), "vit.pooler.dense.bias": torch.ones(32)}
    save_file(dict(tensors), path)
    expect(bundle, tmp_path / "hf")
    assert load(tmp_path / "hf").report.dropped[0][1] == "ViTForImageClassification does not use a pooler"
