"""Weights as training code leaves them: prefixes, settings next to them, other parts of a method."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints.small_models import KINDS, SMALL, assert_same_model, bundle_of, images_for, random_model
from vitrail.checkpoints import write
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.loading import load
from vitrail.errors import VitrailError
from vitrail.models import ViTConfig

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> State:
    path = tmp_path_factory.mktemp("timm") / "plain.safetensors"
    write(bundle_of(KINDS["plain"]), path, "timm")
    return load_file(path)


def expect(path: Path | str, **options: Any) -> Bundle:
    bundle = load(path, heads=SMALL["heads"], **options)
    for name, tensor in random_model(KINDS["plain"]).state_dict().items():
        assert torch.equal(bundle.model.state_dict()[name], tensor), name
    return bundle


def under(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


PREFIXES = ("model.", "net.", "backbone.", "encoder.", "visual.", "_fsdp_wrapped_module.", "model.backbone.", "module.model.")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_are_found(prefix: str, plain: State, tmp_path: Path) -> None:
    save_file(under(prefix, plain), tmp_path / "a.safetensors")
    assert any("stripped" in note for note in expect(tmp_path / "a.safetensors").report.notes)


def test_a_wrapper_around_each_block(plain: State, tmp_path: Path) -> None:
    inner = {name.replace("blocks.0.", "blocks.0._fsdp_wrapped_module."): tensor for name, tensor in plain.items()}
    save_file(under("_fsdp_wrapped_module.", inner), tmp_path / "a.safetensors")
    expect(tmp_path / "a.safetensors")


def test_what_is_outside_the_model_is_said(plain: State, tmp_path: Path) -> None:
    save_file({**under("model.", plain), "loss.weight": torch.ones(3)}, tmp_path / "a.safetensors")
    bundle = expect(tmp_path / "a.safetensors")
    assert ("loss.weight", "outside 'model.': another part of the checkpoint") in bundle.report.dropped
    assert any("loss.weight" in text for text in bundle.report.assumptions)


def test_of_two_models_one_must_be_named(plain: State, tmp_path: Path) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
    save_file({**under("student.backbone.", zeros), **under("teacher.backbone.", plain)}, tmp_path / "a.safetensors")
    with pytest.raises(VitrailError, match=r"several models: student\.backbone, teacher\.backbone\. Choose one"):
        load(tmp_path / "a.safetensors", heads=4)
    expect(f"{tmp_path / 'a.safetensors'}:teacher.backbone")
    with pytest.raises(VitrailError, match="has no part 'nothing'"):
        load(f"{tmp_path / 'a.safetensors'}:nothing")


def lightning(state: State) -> Any:
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": under("model.", state),
        "hyper_parameters": argparse.Namespace(lr=1e-3, layers=[1, 2]),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}}],
    }


def dino(state: State) -> Any:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    head = {"head.mlp.0.weight": torch.ones(2, 2), "head.last_layer.weight_g": torch.ones(2, 1)}
    teacher = {**under("backbone.", state), **head}
    return {"student": under("module.backbone.", zeros), "teacher": teacher, "args": argparse.Namespace(arch="vit"), "epoch": 1}


def dinov2_teacher(state: State) -> Any:
    chunked = {name.replace("blocks.", "blocks.0."): tensor for name, tensor in state.items()}
    head = {"dino_head.mlp.0.weight": torch.ones(2, 2)}
    return {"teacher": {**under("backbone.", {**chunked, "mask_token": torch.ones(1, 32)}), **head}}


def mae(state: State) -> Any:
    decoder = {"decoder_blocks.0.norm1.weight": torch.ones(8), "decoder_pos_embed": torch.ones(1, 5, 8)}
    return {"model": {**state, **decoder, "mask_token": torch.ones(1, 1, 8)}, "args": argparse.Namespace(lr=1)}


def one_part(state: State) -> Any:
    return {"weights_of_the_best_epoch": state, "epoch": 3}


@pytest.mark.parametrize("layout", [lightning, dino, dinov2_teacher, mae, one_part])
def test_training_checkpoints(layout: Callable[[State], Any], plain: State, tmp_path: Path) -> None:
    torch.save(layout(plain), tmp_path / "a.ckpt")
    expect(tmp_path / "a.ckpt")


def test_a_hugging_face_model_inside_a_lightning_module(tmp_path: Path) -> None:
    """Its names are read with and without `vit.`, so it matches under `model.` and under `model.vit.`."""
    from transformers import ViTConfig as HFConfig
    from transformers import ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = ViTForImageClassification(HFConfig(image_size=32, patch_size=16, num_labels=5, **sizes)).eval()
    torch.save({"state_dict": under("model.", model.state_dict()), "pytorch-lightning_version": "2.4"}, tmp_path / "a.ckpt")
    bundle = load(tmp_path / "a.ckpt", heads=4, gelu="erf", norm_eps=1e-12)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert (bundle.model.eval()(images) - model(images).logits).abs().max() < 2e-5


def test_a_decoder_is_left_out_and_said(plain: State, tmp_path: Path) -> None:
    torch.save(mae(plain), tmp_path / "a.pth")
    assert ("decoder_pos_embed", "the decoder of a masked autoencoder") in expect(tmp_path / "a.pth").report.dropped


def test_drop_comes_before_the_format_is_detected(plain: State, tmp_path: Path) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
    save_file({**under("student.", zeros), **under("teacher.", plain)}, tmp_path / "a.safetensors")
    expect(tmp_path / "a.safetensors", drop=["student.*"])


@torch.no_grad()
def test_dinov2_registers_are_behind_a_table_that_covers_only_the_class_token(tmp_path: Path) -> None:
    config = ViTConfig(name="small", registers=2, position_prefix=False, **SMALL).replace(gelu="erf", position_resize="timm")
    model = random_model(config)
    write(bundle_of(config), tmp_path / "timm.safetensors", "timm")
    state = load_file(tmp_path / "timm.safetensors")
    shift = torch.randn(1, 1, 32)
    state["pos_embed"] = torch.cat([shift, state["pos_embed"]], dim=1)
    state["cls_token"] = state["cls_token"] - shift
    state["register_tokens"] = state.pop("reg_token")
    save_file(state, tmp_path / "dinov2.safetensors")
    again = load(tmp_path / "dinov2.safetensors", heads=4).model
    images = images_for(config)
    assert float((again(images) - model(images)).abs().max()) <= 2e-5


def test_big_transfers_torch_files(tmp_path: Path) -> None:
    config = KINDS["bit"]
    bundle = bundle_of(config)
    write(bundle, tmp_path / "timm.safetensors", "timm")
    changes = [(r"^stem\.conv", "root.conv"), (r"downsample\.conv\.", "downsample."), (r"\.norm(\d)", r".gn\1")]
    changes += [(rf"^stages\.{s}\.blocks\.{u}\.", f"body.block{s + 1}.unit{u + 1:02d}.") for s in (0, 1) for u in (0, 1)]
    changes += [(r"^norm\.", "head.gn."), (r"^head\.fc\.", "head.conv.")]
    state = load_file(tmp_path / "timm.safetensors")
    for pattern, replacement in changes:
        state = {re.sub(pattern, replacement, name): tensor for name, tensor in state.items()}
    torch.save({"step": 500, "model": under("module.", state)}, tmp_path / "bit.pth.tar")
    again = load(tmp_path / "bit.pth.tar", image_size=64).model
    assert again.config.resnet == config.resnet  # type: ignore[union-attr]
    assert_same_model(again, bundle.model, config)


def test_the_image_size_gives_the_grid(tmp_path: Path) -> None:
    write(bundle_of(KINDS["rectangle"].replace(image_size=(32, 40))), tmp_path / "a.safetensors", "timm")
    with pytest.raises(VitrailError, match="is not a square grid"):
        load(tmp_path / "a.safetensors", heads=4)
    assert load(tmp_path / "a.safetensors", heads=4, image_size=(32, 40)).model.config.grid == (4, 10)
