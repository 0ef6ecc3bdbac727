"""torchvision's `vit_*` state dicts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.format import PLAIN, Format
from vitrail.checkpoints.infer_config import Hints, Shapes, vit_config
from vitrail.checkpoints.mapping import Row, numbered, rename, row, weight_and_bias
from vitrail.models import ModelConfig, ViTConfig

NUMERICS: dict[str, Any] = {"gelu": "erf", "norm_eps": 1e-6, "position_resize": "torchvision"}
_LAYER = "encoder.layers.encoder_layer_{i}"
_BLOCK = [
    *weight_and_bias("blocks.{i}.norm1", f"{_LAYER}.ln_1"),
    row("blocks.{i}.attention.qkv.weight", f"{_LAYER}.self_attention.in_proj_weight"),
    row("blocks.{i}.attention.qkv.bias", f"{_LAYER}.self_attention.in_proj_bias"),
    *weight_and_bias("blocks.{i}.attention.out", f"{_LAYER}.self_attention.out_proj"),
    *weight_and_bias("blocks.{i}.norm2", f"{_LAYER}.ln_2"),
    *weight_and_bias("blocks.{i}.mlp.up", f"{_LAYER}.mlp.0"),
    *weight_and_bias("blocks.{i}.mlp.down", f"{_LAYER}.mlp.3"),
]
_OTHERS = [
    row("class_token", "class_token"),
    row("positions.table", "encoder.pos_embedding"),
    *weight_and_bias("patches", "conv_proj"),
    *weight_and_bias("norm", "encoder.ln"),
    *weight_and_bias("pre_logits", "heads.pre_logits"),
    *weight_and_bias("head", "heads.head"),
]


def _rows(config: ModelConfig) -> list[Row]:
    assert isinstance(config, ViTConfig)
    return [*_OTHERS, *(r for i in range(config.depth) for r in numbered(_BLOCK, i=i))]


def _matches(names: Collection[str]) -> bool:
    return "conv_proj.weight" in names and "encoder.layers.encoder_layer_0.ln_1.weight" in names


def _normalise_names(archive: Archive) -> None:
    changes = [(r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")]
    rename(archive, changes, "MLP layers found under older names")


def _infer_config(shapes: Shapes, hints: Hints) -> ModelConfig:
    width, channels, height, across = shapes("conv_proj.weight", 4)
    first = _LAYER.format(i=0)
    return vit_config(
        shapes,
        hints,
        numerics=NUMERICS,
        width=width,
        depth=shapes.count("encoder.layers.encoder_layer_{}.ln_1.weight"),
        mlp=shapes(f"{first}.mlp.0.weight", 2)[0],
        kernel=(channels, height, across),
        num_positions=shapes("encoder.pos_embedding", 3)[1],
        covers_prefix=True,
        class_token=True,
        qkv_bias=f"{first}.self_attention.in_proj_bias" in shapes,
        pre_logits=shapes("heads.pre_logits.weight", 2)[0] if "heads.pre_logits.weight" in shapes else None,
        outputs=shapes("heads.head.weight", 2)[0] if "heads.head.weight" in shapes else 0,
    )


TORCHVISION = Format(
    name="torchvision",
    title="torchvision",
    container="torch",
    matches=_matches,
    normalise_names=_normalise_names,
    infer_config=_infer_config,
    rows=_rows,
    numerics=lambda config: NUMERICS,
    preset="imagenet",
    supports={
        **PLAIN,
        "channels": (3,),
        "position": ("learned",),
        "position_prefix": (True,),
        "class_token": (True,),
        "distill_token": (False,),
        "registers": (0,),
        "pooling": ("class",),
        "final_norm": ("before-pool",),
        "qkv_bias": (True,),
        "layer_scale": (None,),
    },
)
