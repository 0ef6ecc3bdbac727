"""Write timm's config.json: the architecture's name in timm, and the arguments that differ from it."""

from __future__ import annotations

from typing import Any

from vitrail.checkpoints.timm_architectures import POOLS
from vitrail.errors import VitrailError
from vitrail.models import BiTConfig, ModelConfig, ViTConfig

_HYBRIDS = {
    "R+ViT-Ti/16": "vit_tiny_r_s16_p8_224",
    "R26+ViT-S/32": "vit_small_r26_s32_224",
    "R26+ViT-B/32": "vit_base_r26_s32_224",
    "R50+ViT-B/16": "vit_base_r50_s16_224",
    "R50+ViT-L/32": "vit_large_r50_s32_224",
}
_POOLS = {ours: theirs for theirs, ours in POOLS.items()}


def timm_config(config: ModelConfig, preprocess: dict[str, Any], classes: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the config.json that timm reads for `local-dir:` and Hub models."""
    architecture, arguments = _bit(config) if isinstance(config, BiTConfig) else _vit(config)
    values: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": config.outputs,
        "global_pool": _POOLS[getattr(config, "pooling", "mean")],
        "model_args": arguments,
        "pretrained_cfg": {
            "custom_load": False,
            "num_classes": config.outputs,
            "fixed_input_size": not isinstance(config, BiTConfig),
            **preprocess,
        },
    }
    return values | ({"label_names": list(classes)} if classes else {})


def _bit(config: BiTConfig) -> tuple[str, dict[str, Any]]:
    name = config.name.removeprefix("BiT-R")
    if name not in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4"):
        raise VitrailError(
            f"timm has no architecture for {config.name}, which its folder format needs. Write a .safetensors file instead."
        )
    return f"resnetv2_{name}_bit", {"in_chans": config.channels}


def _vit(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    assert isinstance(config, ViTConfig)
    arguments: dict[str, Any] = {"img_size": list(config.image_size), "in_chans": config.channels}
    if config.gelu == "tanh":
        arguments["act_layer"] = "gelu_tanh"
    if config.qk_norm:
        arguments["qk_norm"] = True
    if config.resnet:
        if config.name not in _HYBRIDS:
            raise VitrailError(
                f"timm has no architecture for {config.name}, which its folder format needs. Write a .safetensors file instead."
            )
        return _HYBRIDS[config.name], arguments
    arguments |= {
        "patch_size": list(config.patch),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp / config.width,
        "qkv_bias": config.qkv_bias,
        "class_token": config.class_token,
        "no_embed_class": not config.position_prefix,
        "reg_tokens": config.registers,
        "pos_embed": "learn" if config.position == "learned" else "none",
        "fc_norm": config.final_norm == "after-pool",
        "global_pool": _POOLS[config.pooling],
        "init_values": config.layer_scale,
    }
    return ("deit_base_distilled_patch16_224" if config.distill_token else "vit_base_patch16_224"), arguments
