"""Corrupted, inconsistent and malicious files: always a clear error, never a crash, a hang or a partial output."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.fuzz import mutate
from tests.checkpoints.small_models import KINDS, SUFFIX, bundle_of, needed_fields
from vitrail.checkpoints import convert, write
from vitrail.checkpoints.loading import load
from vitrail.errors import VitrailError
from vitrail.models import BiTConfig, ModelConfig, ResNetConfig, ViTConfig

TINY = ViTConfig(name="tiny", width=4, depth=1, heads=2, mlp=4, patch=(2, 2), image_size=(4, 4), outputs=2)
TINY_BIT = BiTConfig(name="tiny", resnet=ResNetConfig(layers=(1,)), outputs=2, image_size=(8, 8))


class MakesFolder:
    """A pickle that creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def written(folder: Path, name: str, config: ModelConfig = KINDS["plain"], suffix: str | None = None) -> Path:
    target = folder / f"good{SUFFIX[name] if suffix is None else suffix}"
    write(bundle_of(config), target, name)
    return target


def rejected(path: Path | str, message: str, **fields: object) -> None:
    with pytest.raises(VitrailError, match=message):
        load(path, **{**needed_fields(KINDS["plain"]), **fields})


# Pickle never runs


@pytest.mark.parametrize("legacy", [False, True])
def test_a_malicious_pth_does_not_run(legacy: bool, tmp_path: Path) -> None:
    torch.save({"model": MakesFolder(tmp_path / "ran")}, tmp_path / "evil.pth", _use_new_zipfile_serialization=not legacy)
    rejected(tmp_path / "evil.pth", r"evil\.pth needs unsafe unpickling.*sandbox")
    assert not (tmp_path / "ran").exists()


def test_a_bare_malicious_pickle_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(MakesFolder(tmp_path / "ran")))
    rejected(tmp_path / "evil.pth", "evil")
    assert not (tmp_path / "ran").exists()


def test_a_malicious_npz_does_not_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", **{"embedding/kernel": np.array([MakesFolder(tmp_path / "ran")], dtype=object)})
    rejected(tmp_path / "evil.npz", r"needs unsafe unpickling \('embedding/kernel' contains Python objects\)")
    assert not (tmp_path / "ran").exists()


def test_settings_of_training_code_do_not_run(tmp_path: Path) -> None:
    torch.save({"model": {}, "args": argparse.Namespace(lr=MakesFolder(tmp_path / "ran"))}, tmp_path / "evil.pth")
    rejected(tmp_path / "evil.pth", "needs unsafe unpickling")
    assert not (tmp_path / "ran").exists()


# Corrupted files


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize(("name", "suffix"), [("google", ".npz"), ("timm", ".safetensors"), ("torchvision", ".pth")])
def test_truncated_files(name: str, suffix: str, fraction: float, tmp_path: Path) -> None:
    path = written(tmp_path, name, suffix=suffix)
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])
    rejected(path, r"is empty|corrupted|incomplete|truncated|not a supported weight file")


def test_files_of_other_kinds(tmp_path: Path) -> None:
    for start, message in {
        b"version https://git-lfs.github.com/spec/v1": "Git LFS pointer",
        b"<!DOCTYPE html><html>": "web page",
        b"\x89HDF\r\n\x1a\n": "HDF5",
        b"just some text": "not a supported weight file",
    }.items():
        (tmp_path / "x.npz").write_bytes(start)
        rejected(tmp_path / "x.npz", message)
    rejected(tmp_path / "missing.npz", "There is no checkpoint")
    rejected(tmp_path, "without a checkpoint's config.json")


@pytest.mark.parametrize(("name", "from_suffix", "to_suffix"), [("google", ".npz", ".pth"), ("timm", ".safetensors", ".npz")])
def test_a_wrong_suffix_does_not_matter(name: str, from_suffix: str, to_suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, suffix=from_suffix)
    moved = path.rename(tmp_path / f"moved{to_suffix}")
    assert load(moved, **needed_fields(KINDS["plain"])).report.format == name


def test_shuffled_tensors_are_rejected(tmp_path: Path) -> None:
    path = written(tmp_path, "timm")
    tensors = load_file(path)
    names = list(tensors)
    values = list(tensors.values())
    random.Random(0).shuffle(values)
    save_file({name: value.clone() for name, value in zip(names, values, strict=True)}, path)
    rejected(path, "good")


def test_a_renamed_tensor_is_listed_as_unexpected_and_missing(tmp_path: Path) -> None:
    path = written(tmp_path, "timm")
    tensors = load_file(path)
    tensors["blocks.1.attn.projection.weight"] = tensors.pop("blocks.1.attn.proj.weight")
    save_file(dict(tensors), path)
    rejected(
        path,
        r"Unexpected in the file \(1\): blocks\.1\.attn\.projection\.weight.*Missing.*blocks\.1\.attn\.proj\.weight.*Did you mean",
    )


def test_extra_tensors_are_rejected_unless_dropped(tmp_path: Path) -> None:
    path = written(tmp_path, "timm")
    save_file({**load_file(path), "decoder.weight": torch.ones(2, 2)}, path)
    rejected(path, r"decoder\.weight.*drop=")
    bundle = load(path, drop=["decoder.*"], **needed_fields(KINDS["plain"]))
    assert bundle.report.dropped == [("decoder.weight", "dropped by the user")]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["google", "timm"])
def test_values_that_are_not_finite(name: str, value: float, tmp_path: Path) -> None:
    bundle = bundle_of(KINDS["plain"])
    with torch.no_grad():
        bundle.model.blocks[1].mlp.up.weight[3, 2] = value  # type: ignore[union-attr,index]
    with pytest.raises(VitrailError, match="not finite"):
        write(bundle, tmp_path / f"x{SUFFIX[name]}", name)
    assert list(tmp_path.iterdir()) == []
    path = written(tmp_path, "google")
    arrays = dict(np.load(path))
    arrays["head/kernel"][0, 0] = value
    np.savez(path, **arrays)
    rejected(path, "head/kernel contains values that are not finite")


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.complex64, np.bool_, "S4"])
def test_wrong_dtypes(dtype: object, tmp_path: Path) -> None:
    path = written(tmp_path, "google")
    arrays = dict(np.load(path))
    arrays["cls"] = arrays["cls"].astype(dtype)  # type: ignore[arg-type]
    np.savez(path, **arrays)
    rejected(path, "'cls' is not a floating-point tensor")


@pytest.mark.slow
def test_a_zip_bomb_is_rejected_before_it_unpacks(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as bundle:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 27,)})
        with bundle.open("embedding/kernel.npy", "w") as member:
            member.write(header.getvalue())
            for _ in range(512):
                member.write(bytes(1 << 20))
    assert (tmp_path / "bomb.npz").stat().st_size < 2 << 20
    rejected(tmp_path / "bomb.npz", "claims to unpack to 536,")


def test_huge_shapes_allocate_nothing(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1 << 10)})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as bundle:
        bundle.writestr("embedding/kernel.npy", header.getvalue() + bytes(64))
    rejected(tmp_path / "huge.npz", "bytes are stored for it")
    text = b'{"patch_embed.proj.weight":{"dtype":"F32","shape":[1099511627776,3,16,16],"data_offsets":[0,64]}}'
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    rejected(tmp_path / "huge.safetensors", "corrupted")


def test_empty_dimensions_are_rejected(tmp_path: Path) -> None:
    path = written(tmp_path, "timm")
    tensors = load_file(path)
    tensors["patch_embed.proj.weight"] = torch.empty(0, 3, 8, 8)
    save_file(dict(tensors), path)
    rejected(path, "non-empty dimension")


def test_duplicate_names(tmp_path: Path) -> None:
    path = written(tmp_path, "google")
    with zipfile.ZipFile(path) as bundle:
        content = bundle.read("cls.npy")
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as bundle:
        bundle.writestr("cls.npy", content)
    rejected(path, "'cls' twice")
    path = written(tmp_path, "timm")
    save_file({**load_file(path), "module.cls_token": torch.ones(1, 1, 32)}, path)
    rejected(path, "under two names")


def test_heads_must_be_given_if_they_cannot_be_inferred(tmp_path: Path) -> None:
    path = written(tmp_path, "timm")
    with pytest.raises(VitrailError, match=r"width 32, depth 3 and MLP 64.*heads="):
        load(path)
    rejected(written(tmp_path, "google"), "heads=2 was given, but .* has 4 heads", heads=2)
    rejected(path, "no field 'haeds'", haeds=3)


def test_the_grid_must_be_given_if_it_is_not_square(tmp_path: Path) -> None:
    path = written(tmp_path, "google", KINDS["rectangle"].replace(image_size=(32, 24)))
    with pytest.raises(VitrailError, match=r"position embedding with 25 entries.*grid=\(rows, columns\)"):
        load(path)
    assert load(path, grid=(4, 6)).model.config.image_size == (32, 24)
    rejected(path, "does not match", grid=(5, 5))


def test_our_own_weights_without_their_config(tmp_path: Path) -> None:
    path = written(tmp_path, "vitrail")
    (path / "config.json").unlink()
    rejected(path / "model.safetensors", "without their config.json")


def test_weights_of_something_else(tmp_path: Path) -> None:
    save_file({"layer1.0.conv1.weight": torch.ones(2, 2), "fc.weight": torch.ones(2)}, tmp_path / "resnet.safetensors")
    rejected(tmp_path / "resnet.safetensors", r"contains 2 tensors \(fc\.weight, layer1.*match no supported format")
    torch.save([1, 2], tmp_path / "list.pth")
    rejected(tmp_path / "list.pth", "a value of type list, not a state dict")
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    rejected(tmp_path / "none.pth", "no tensors")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 64),
        ("num_hidden_layers", 12),
        ("patch_size", 16),
        ("image_size", 224),
        ("id2label", {"0": "a"}),
        ("hidden_act", "relu"),
        ("num_attention_heads", 5),
        ("num_attention_heads", "many"),
        ("layer_norm_eps", "small"),
    ],
)
def test_a_hugging_face_config_that_disagrees_with_the_weights(key: str, value: object, tmp_path: Path) -> None:
    path = written(tmp_path, "hf")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, key: value}))
    with pytest.raises(VitrailError):
        load(path)


@pytest.mark.parametrize(("key", "value"), [("num_classes", 7), ("model_args", {"depth": 9}), ("model_args", {"num_heads": "x"})])
def test_a_timm_config_that_disagrees_with_the_weights(key: str, value: object, tmp_path: Path) -> None:
    path = written(tmp_path, "timm", suffix="")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, key: value}))
    with pytest.raises(VitrailError):
        load(path)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, "google", KINDS["hybrid"])
    for target, to in (("out", "hf"), ("out.pth", "torchvision"), ("out.npz", "bit"), ("out.txt", "timm"), ("out", "nowhere")):
        with pytest.raises(VitrailError):
            convert(path, tmp_path / target, to, grid=KINDS["hybrid"].grid)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


# 10,000 mutations


def mutations(content: bytes, count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [mutate(content, rng) for _ in range(count)]


FUZZED = [
    ("google", TINY, ".npz"),
    ("big-vision", TINY, ".npz"),
    ("timm", TINY, ".safetensors"),
    ("timm", TINY, ".pth"),
    ("hf", TINY, ""),
    ("torchvision", TINY, ".pth"),
    ("torchvision", TINY, ".safetensors"),
    ("vitrail", TINY, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "suffix"), FUZZED)
def test_mutated_files_raise_vitrail_errors_or_load(name: str, config: ModelConfig, suffix: str, tmp_path: Path) -> None:
    """Load 1,300 mutations of each kind of file, 10,400 together. Any error but a VitrailError fails the test."""
    good = written(tmp_path, name, config, suffix)
    files = sorted(good.iterdir()) if good.is_dir() else [good]
    fields = {} if name == "vitrail" else needed_fields(config)
    load(good, **fields)
    outcomes = {"loaded": 0, "rejected": 0}
    for file in files:
        content = file.read_bytes()
        for changed in mutations(content, 1300 // len(files), seed=len(name) + len(suffix)):
            file.write_bytes(changed)
            try:
                load(good, **fields)
                outcomes["loaded"] += 1
            except VitrailError as error:
                assert str(error)
                outcomes["rejected"] += 1
        file.write_bytes(content)
    assert outcomes["rejected"] > 300, outcomes
    assert [item.name for item in tmp_path.iterdir()] == [good.name]


@pytest.mark.slow
def test_mutated_sources_leave_no_partial_output(tmp_path: Path) -> None:
    good = written(tmp_path, "google", TINY)
    content = good.read_bytes()
    for number, changed in enumerate(mutations(content, 150, seed=99)):
        good.write_bytes(changed)
        target = tmp_path / f"out{number}"
        try:
            convert(good, target, "vitrail")
        except VitrailError:
            assert [item.name for item in tmp_path.iterdir()] == [good.name]
            continue
        load(target, verify="full")
        for item in target.iterdir():
            item.unlink()
        target.rmdir()


def test_mutated_bit_files(tmp_path: Path) -> None:
    good = written(tmp_path, "bit", TINY_BIT)
    content = good.read_bytes()
    rejections = 0
    for changed in mutations(content, 60, seed=4):
        good.write_bytes(changed)
        try:
            load(good)
        except VitrailError:
            rejections += 1
    assert rejections
