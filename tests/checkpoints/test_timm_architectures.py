"""Every ViT, hybrid and BiT architecture of timm is read as timm computes it, or rejected by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from vitrail.checkpoints.loading import load
from vitrail.checkpoints.timm_architectures import Architecture, find_architecture
from vitrail.errors import VitrailError

MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "resnetv2")
NAMES = sorted({name for module in MODULES for name in timm.list_models(module=module)})


def _supported(name: str) -> Architecture | None:
    try:
        return find_architecture(name)
    except VitrailError as error:
        assert f"{name!r}, which is not supported: it" in str(error)
        return None


SUPPORTED = {name: architecture for name in NAMES if (architecture := _supported(name))}
SCALABLE = [name for name in SUPPORTED if not re.search(r"_bit$|_r\d*_s\d\d_", name)]


def test_every_architecture_of_timm_is_in_the_list() -> None:
    assert len(NAMES) > 190
    assert {name for name in NAMES if name.endswith("_bit")} <= SUPPORTED.keys()
    assert {name for name in NAMES if re.search(r"_r\d*_s\d\d_", name)} <= SUPPORTED.keys()
    assert len(SUPPORTED) == 130


def _folder(name: str, folder: Path, num_classes: int = 5, **arguments: Any) -> nn.Module:
    """Write a folder as timm does, with a small model of this architecture whose every weight matters."""
    theirs = timm.create_model(name, num_classes=num_classes, **arguments).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm_like = parameter.ndim == 1 and not key.endswith("bias")
            parameter.copy_(1 + 0.2 * noise if norm_like else (0.1 if parameter.ndim == 1 else 0.15) * noise)
    folder.mkdir()
    save_file({key: value.contiguous() for key, value in theirs.state_dict().items()}, folder / "model.safetensors")
    values = {"architecture": name, "num_classes": num_classes, "model_args": arguments, "pretrained_cfg": {}}
    (folder / "config.json").write_text(json.dumps(values))
    return theirs


def _small(name: str, heads: int, **arguments: Any) -> dict[str, Any]:
    patch = re.search(r"patch(\d+)", name)
    return {"embed_dim": 8 * heads, "depth": 1, "img_size": 2 * int(patch[1] if patch else 16), **arguments}


@torch.no_grad()
def _difference(theirs: nn.Module, folder: Path, size: int) -> float:
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    one, two = theirs(images), load(folder).model(images)
    assert one.abs().max() > 0.1
    return float((one - two).abs().max())


@pytest.mark.parametrize("names", [SCALABLE[::9], pytest.param(SCALABLE, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_name_decides_what_tensors_do_not_show(names: list[str], tmp_path: Path) -> None:
    for name in names:
        arguments = _small(name, SUPPORTED[name].heads or 0)
        assert _difference(_folder(name, tmp_path / name, **arguments), tmp_path / name, arguments["img_size"]) <= 2e-5, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"act_layer": "relu"}, "act_layer='relu'"),
        ({"act_layer": "quick_gelu"}, "act_layer='quick_gelu'"),
        ({"global_pool": "avgmax"}, "global_pool='avgmax'"),
        ({"global_pool": "max"}, "global_pool='max'"),
        ({"global_pool": ""}, "global_pool=''"),
        ({"global_pool": "avg", "pool_include_prefix": True}, "pool_include_prefix=True"),
        ({"norm_layer": "layernormfp32"}, "norm_layer='layernormfp32'"),
        ({"final_norm": False}, "final_norm=False"),
    ],
)
def test_arguments_that_change_the_function_are_rejected(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    _folder("vit_tiny_patch16_224", tmp_path / "timm", **_small("vit_tiny_patch16_224", 3, **arguments))
    with pytest.raises(VitrailError, match=re.escape(message)):
        load(tmp_path / "timm")


@pytest.mark.parametrize(
    "arguments",
    [{"act_layer": "gelu_tanh"}, {"global_pool": "avg"}, {"global_pool": "avg", "fc_norm": False}, {"norm_layer": "layernorm"}],
    ids=str,
)
def test_supported_arguments_are_applied(arguments: dict[str, Any], tmp_path: Path) -> None:
    small = _small("vit_tiny_patch16_224", 3, **arguments)
    theirs = _folder("vit_tiny_patch16_224", tmp_path / "timm", **small)
    assert _difference(theirs, tmp_path / "timm", small["img_size"]) <= 2e-5


def _store_pooling(folder: Path, pool: str | None) -> None:
    """Store the pooling next to the arguments of the model instead of in them, or not at all."""
    config = json.loads((folder / "config.json").read_text())
    config["model_args"].pop("global_pool", None)
    (folder / "config.json").write_text(json.dumps({**config, "global_pool": pool}))


@pytest.mark.parametrize("arguments", [{"global_pool": "avg"}, {"global_pool": "avg", "fc_norm": False}], ids=str)
def test_pooling_stored_next_to_the_arguments_is_applied(arguments: dict[str, Any], tmp_path: Path) -> None:
    """timm's `save_for_hf` stores it there, and versions up to 1.0 store no arguments that were not given to it."""
    small = _small("vit_tiny_patch16_224", 3, **arguments)
    theirs = _folder("vit_tiny_patch16_224", tmp_path / "timm", **small)
    _store_pooling(tmp_path / "timm", "avg")
    assert _difference(theirs, tmp_path / "timm", small["img_size"]) <= 2e-5


@pytest.mark.parametrize("pool", ["max", "avgmax"])
def test_other_pooling_stored_next_to_the_arguments_is_rejected(pool: str, tmp_path: Path) -> None:
    _folder("vit_tiny_patch16_224", tmp_path / "timm", **_small("vit_tiny_patch16_224", 3, global_pool=pool))
    _store_pooling(tmp_path / "timm", pool)
    with pytest.raises(VitrailError, match=f"global_pool='{pool}'"):
        load(tmp_path / "timm")
    _store_pooling(tmp_path / "timm", None)
    with pytest.raises(VitrailError, match="class-token pooling, but the file has tensors of fc_norm"):
        load(tmp_path / "timm")


def test_a_post_norm_architecture_with_the_same_tensors_is_rejected(tmp_path: Path) -> None:
    _folder("vit_base_patch16_rpn_224", tmp_path / "timm", **_small("vit_base_patch16_rpn_224", 12))
    with pytest.raises(VitrailError, match=r"vit_base_patch16_rpn_224.*normalises after attention"):
        load(tmp_path / "timm")


def test_an_unknown_architecture_is_rejected_with_similar_names(tmp_path: Path) -> None:
    _folder("vit_tiny_patch16_224", tmp_path / "timm", **_small("vit_tiny_patch16_224", 3))
    config = tmp_path / "timm" / "config.json"
    config.write_text(config.read_text().replace("vit_tiny_patch16_224", "vit_tiny_patch16_225"))
    with pytest.raises(VitrailError, match=r"'vit_tiny_patch16_225', which is not in .* Did you mean vit_tiny_patch16_224"):
        load(tmp_path / "timm")


def test_names_with_tags_and_older_names() -> None:
    assert find_architecture("vit_base_patch16_224.augreg_in21k") == find_architecture("vit_base_patch16_224_in21k")
    assert find_architecture("resnetv2_50x1_bitm_in21k").heads is None


def test_what_a_bare_file_does_not_show_is_said(tmp_path: Path) -> None:
    _folder("vit_tiny_patch16_224", tmp_path / "timm", **_small("vit_tiny_patch16_224", 3))
    bare = tmp_path / "bare.safetensors"
    (tmp_path / "timm" / "model.safetensors").rename(bare)
    (said,) = [text for text in load(bare, heads=3).report.assumptions if "architecture" in text]
    assert "gelu='erf'" in said and "pooling='class'" in said
    (said,) = [text for text in load(bare, heads=3, gelu="tanh").report.assumptions if "architecture" in text]
    assert "gelu" not in said
