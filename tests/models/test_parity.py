"""The same weights give the same logits as in timm, Hugging Face and torchvision, each with its own numerics."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from timm.models.deit import VisionTransformerDistilled as TimmDistilled
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import Tensor
from transformers import ViTConfig as HFConfig
from transformers import ViTForImageClassification, ViTModel

from tests.models import other_libraries as others
from vitrail import create_model
from vitrail.models import ViTConfig, build_model

SHAPE = {"width": 48, "depth": 3, "heads": 3, "mlp": 96, "patch": 8}
TIMM_SHAPE = {"patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "mlp_ratio": 2}
HYBRID_NUMERICS = {"gelu": "erf", "standardise": "sqrt(var+eps)", "standardise_eps": 1e-8, "group_norm_eps": 1e-5}


def small(*, image_size: int | tuple[int, int] = 32, **fields: object) -> torch.nn.Module:
    return build_model(ViTConfig(name="small", outputs=7, image_size=image_size, **SHAPE, **fields))  # type: ignore[arg-type]


def images(*size: int, count: int = 3) -> Tensor:
    return torch.randn(count, 3, *size)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 2e-5) -> None:
    assert theirs.std() > 0.05, "the other library's output carries no signal, so agreement would prove nothing"
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


TIMM_KINDS = {
    "class": ({}, {}),
    "mean, norm before": (
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
        {"pooling": "mean", "class_token": False},
    ),
    "mean, norm after": (
        {"global_pool": "avg", "class_token": False},
        {"pooling": "mean", "class_token": False, "final_norm": "after-pool"},
    ),
    "mean with a class token": (
        {"global_pool": "avg", "class_token": True},
        {"pooling": "mean", "final_norm": "after-pool"},
    ),
    "map": ({"global_pool": "map", "class_token": False}, {"pooling": "map", "class_token": False}),
    "registers": ({"reg_tokens": 4}, {"registers": 4}),
    "registers without positions": (
        {"reg_tokens": 4, "no_embed_class": True},
        {"registers": 4, "position_prefix": False},
    ),
    "layer scale": ({"init_values": 0.5}, {"layer_scale": 0.5}),
    "no qkv bias": ({"qkv_bias": False}, {"qkv_bias": False}),
    "qk norm": ({"qk_norm": True}, {"qk_norm": True}),
    "qk norm, map": (
        {"qk_norm": True, "global_pool": "map", "class_token": False},
        {"qk_norm": True, "pooling": "map", "class_token": False},
    ),
}


@pytest.mark.parametrize("kind", TIMM_KINDS)
def test_timm_vit(kind: str) -> None:
    theirs_fields, fields = TIMM_KINDS[kind]
    theirs = others.randomise(TimmViT(img_size=32, num_classes=7, **TIMM_SHAPE, **theirs_fields))
    ours = others.load(small(gelu="erf", position_resize="timm", **fields), others.renamed(theirs.state_dict(), others.TIMM))
    batch = images(32, 32)
    close(ours(batch), theirs(batch))
    theirs.set_input_size((48, 40))
    batch = images(48, 40)
    close(ours.resize((48, 40))(batch), theirs(batch))


def test_timm_distilled() -> None:
    theirs = others.randomise(TimmDistilled(img_size=32, num_classes=7, **TIMM_SHAPE))
    ours = others.load(
        small(gelu="erf", distill_token=True, position_resize="timm"),
        others.renamed(theirs.state_dict(), others.TIMM),
    )
    batch = images(32, 32)
    close(ours(batch), theirs(batch))
    theirs.set_distilled_training(True)
    theirs.train()
    for one, two in zip(ours.distilled_logits(batch), theirs(batch), strict=True):
        close(one, two)
    theirs.eval().set_distilled_training(False)
    theirs.set_input_size((64, 24))
    batch = images(64, 24)
    close(ours.resize((64, 24))(batch), theirs(batch))


@pytest.mark.parametrize("ours_gelu", ["tanh", "erf"])
def test_the_tolerance_tells_the_two_gelus_apart(ours_gelu: str) -> None:
    theirs = others.randomise(TimmViT(img_size=32, num_classes=7, **TIMM_SHAPE))
    ours = others.load(small(gelu=ours_gelu), others.renamed(theirs.state_dict(), others.TIMM))
    batch = images(32, 32)
    apart = (ours(batch) - theirs(batch)).abs().max()
    assert apart < 2e-5 if ours_gelu == "erf" else apart > 2e-5


@pytest.mark.slow
def test_timm_base_at_full_size() -> None:
    theirs = others.randomise(timm.create_model("vit_base_patch16_224", num_classes=10))
    ours = others.load(create_model("ViT-B/16", outputs=10, gelu="erf"), others.renamed(theirs.state_dict(), others.TIMM))
    batch = images(224, 224, count=1)
    with torch.inference_mode():
        close(ours(batch), theirs(batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "theirs_name"),
    [("R+ViT-Ti/16", "vit_tiny_r_s16_p8_224"), ("R26+ViT-S/32", "vit_small_r26_s32_224"), ("R50+ViT-B/16", "vit_base_r50_s16_224")],
)
def test_timm_hybrid(name: str, theirs_name: str) -> None:
    theirs = others.randomise(timm.create_model(theirs_name, num_classes=10))
    ours = create_model(name, outputs=10, **HYBRID_NUMERICS)  # type: ignore[arg-type]
    others.load(ours, others.renamed(theirs.state_dict(), others.TIMM_HYBRID))
    batch = images(224, 224, count=2)
    with torch.inference_mode():
        close(ours(batch), theirs(batch), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "theirs_name"), [("BiT-R50x1", "resnetv2_50x1_bit"), ("BiT-R101x1", "resnetv2_101x1_bit")])
@pytest.mark.parametrize("size", [(64, 64), (75, 50)])
def test_timm_bit(name: str, theirs_name: str, size: tuple[int, int]) -> None:
    theirs = others.randomise(timm.create_model(theirs_name, num_classes=10))
    ours = create_model(name, outputs=10, image_size=size, standardise_eps=1e-8)
    rules = [*others.TIMM_RESNET, (r"^head\.fc\.", "head.")]
    others.load(ours, others.renamed(theirs.state_dict(), rules))
    batch = images(*size)
    with torch.inference_mode():
        close(ours(batch), theirs(batch), tolerance=1e-4)


def hf_state(model: torch.nn.Module) -> dict[str, Tensor]:
    state = {}
    for key, value in others.renamed(model.state_dict(), others.HF).items():
        key = key.replace("layers.", "blocks.").replace("layernorm_before", "norm1").replace("layernorm_after", "norm2")
        state[key.replace("o_proj", "out").replace("mlp.fc1", "mlp.up").replace("mlp.fc2", "mlp.down")] = value
    for key in [key for key in state if "q_proj" in key]:
        parts = [state.pop(key.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        state[key.replace("q_proj", "qkv")] = torch.cat(parts)
    return state


def hf_config(**fields: object) -> HFConfig:
    shape = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 96}
    return HFConfig(**shape, image_size=32, patch_size=8, num_labels=7, **fields)


@pytest.mark.parametrize(("act", "gelu"), [("gelu", "erf"), ("gelu_pytorch_tanh", "tanh")])
def test_hf_classifier(act: str, gelu: str) -> None:
    theirs = others.randomise(ViTForImageClassification(hf_config(hidden_act=act)))
    ours = others.load(small(gelu=gelu, norm_eps=1e-12, position_resize="hf"), hf_state(theirs))
    batch = images(32, 32)
    close(ours(batch), theirs(batch).logits)
    batch = images(56, 40)
    close(ours.resize((56, 40))(batch), theirs(batch, interpolate_pos_encoding=True).logits)


def test_hf_pooler_is_the_pre_logits_layer() -> None:
    theirs = others.randomise(ViTModel(hf_config()))
    ours = build_model(ViTConfig(name="s", outputs=0, image_size=(32, 32), gelu="erf", norm_eps=1e-12, pre_logits=48, **SHAPE))
    others.load(ours, hf_state(theirs))
    batch = images(32, 32)
    expected = theirs(batch)
    close(ours(batch), expected.pooler_output)
    close(ours.features(batch).tokens, expected.last_hidden_state)


@pytest.mark.parametrize("representation", [None, 20])
def test_torchvision(representation: int | None) -> None:
    theirs = torchvision.models.VisionTransformer(32, 8, 3, 3, 48, 96, num_classes=7, representation_size=representation)
    others.randomise(theirs)
    state = {
        key.replace("qkv.in_proj_", "qkv."): value for key, value in others.renamed(theirs.state_dict(), others.TORCHVISION).items()
    }
    ours = others.load(small(gelu="erf", pre_logits=representation, position_resize="torchvision"), state)
    batch = images(32, 32)
    close(ours(batch), theirs(batch))
    larger = torchvision.models.VisionTransformer(56, 8, 3, 3, 48, 96, num_classes=7, representation_size=representation)
    resized = torchvision.models.vision_transformer.interpolate_embeddings(56, 8, theirs.state_dict())
    larger.load_state_dict(resized)
    batch = images(56, 56)
    close(ours.resize(56)(batch), larger.eval()(batch))
