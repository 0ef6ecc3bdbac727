"""Initial values, each kind of parameter against timm's own model."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import ViT, ViTConfig, create_model
from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.masked import MaskedPatches

TIMM = {
    "class_token": "cls_token",
    "positions.table": "pos_embed",
    "patches.weight": "patch_embed.proj.weight",
    "patches.bias": "patch_embed.proj.bias",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}


def vit(init: str, **changes: object) -> ViT:
    model = create_model("ViT-S/8", outputs=200, image_size=64, seed=0, init=init, **changes)  # type: ignore[arg-type]
    assert isinstance(model, ViT)
    return model


@pytest.fixture(scope="module")
def theirs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", patch_size=8, img_size=64, num_classes=200)
    return {name: value.detach() for name, value in model.named_parameters()}


def test_small_values_have_timms_statistics(theirs: dict[str, Tensor]) -> None:
    checked = set()
    for name, value in vit("small").named_parameters():
        name_there = name
        for ours, other in TIMM.items():
            name_there = name_there.replace(ours, other)
        other = theirs[name_there]
        assert value.numel() == other.numel(), name
        if name == "class_token":  # DeiT's .02; timm draws almost zeros here
            assert value.std().item() == pytest.approx(0.02, rel=0.1)
        elif name == "patches.bias":  # 384 numbers: the bound is exact, the deviation is not
            assert value.abs().max().item() == pytest.approx(192**-0.5, rel=0.05) and value.abs().max() <= 192**-0.5
            assert value.std().item() == pytest.approx(other.std().item(), rel=0.1)
        else:
            assert value.std().item() == pytest.approx(other.std().item(), rel=0.05), name
            assert value.mean().item() == pytest.approx(other.mean().item(), abs=2e-3), name
        checked.add(name_there)
    assert checked == set(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("patches.weight", 192**-0.5),
        ("blocks.3.attention.qkv.weight", math.sqrt(2 / (384 + 384))),
        ("blocks.3.attention.out.weight", math.sqrt(2 / (384 + 384))),
        ("blocks.3.mlp.up.weight", math.sqrt(2 / (384 + 1536))),
        ("blocks.3.mlp.down.weight", math.sqrt(2 / (384 + 1536))),
        ("positions.table", 0.02),
        ("class_token", 0.0),
        ("patches.bias", 0.0),
        ("blocks.3.attention.qkv.bias", 0.0),
        ("head.weight", 0.0),
    ],
)
def test_the_papers_values_stay_the_default(name: str, std: float) -> None:
    named, default = (
        dict(model.named_parameters()) for model in (vit("paper"), create_model("ViT-S/8", outputs=200, image_size=64, seed=0))
    )
    assert named[name].std().item() == pytest.approx(std, rel=0.05)
    assert torch.equal(named[name], default[name])


@pytest.mark.slow
def test_small_values_of_the_rarer_parts() -> None:
    state = vit("small", pooling="map", class_token=True, registers=8, pre_logits=384, head_bias=-6.9).state_dict()
    for name in ("pool.q.weight", "pool.kv.weight", "pool.out.weight", "pool.mlp.up.weight", "pre_logits.weight", "registers"):
        assert state[name].std().item() == pytest.approx(0.02, rel=0.05), name
    assert state["pool.probe"].std().item() == pytest.approx(384**-0.5, rel=0.1)
    assert (state["head.bias"] == -6.9).all() and (state["pool.kv.bias"] == 0).all()
    hybrid = create_model("R26+ViT-S/32", image_size=64, seed=0, init="small")
    assert isinstance(hybrid, ViT)
    assert hybrid.patches.weight.std().item() == pytest.approx((3 * 2048) ** -0.5, rel=0.05)
    assert (hybrid.resnet.stages[0][0].norm3.weight == 0).all()  # type: ignore[union-attr,index]


@pytest.mark.parametrize("init", ["paper", "small"])
def test_parts_of_pretraining_follow_the_encoder(init: str) -> None:
    torch.manual_seed(0)
    autoencoder = MaskedAutoencoder(vit(init), 192, width=128, depth=2)
    autoencoder.reset(torch.Generator().manual_seed(0))
    patches = MaskedPatches(vit(init), 512)
    patches.reset(torch.Generator().manual_seed(0))
    xavier = {
        "narrow": math.sqrt(2 / (384 + 128)), "head": math.sqrt(2 / (128 + 192)), "qkv": math.sqrt(2 / 256),
        "up": math.sqrt(2 / (128 + 512)), "patches": 384**-0.5,
    }  # fmt: skip
    block = autoencoder.decoder_blocks[0]
    layers: dict[str, nn.Linear] = {
        "narrow": autoencoder.narrow, "head": autoencoder.head, "qkv": block.attention.qkv, "up": block.mlp.up,  # type: ignore[union-attr,dict-item]
        "patches": patches.head,
    }  # fmt: skip
    for name, layer in layers.items():
        assert layer.weight.std().item() == pytest.approx(0.02 if init == "small" else xavier[name], rel=0.05), name


def test_a_configuration_without_the_field_means_the_papers() -> None:
    values = vit("small").config.to_dict()
    assert ViTConfig.from_dict(values).init == "small"
    del values["init"]
    assert ViTConfig.from_dict(values).init == "paper"
    with pytest.raises(VitrailError, match="init is 'tiny'; it can be 'paper', 'small'"):
        vit("tiny")
