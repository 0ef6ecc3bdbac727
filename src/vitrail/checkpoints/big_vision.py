"""big_vision's .npz files: Linen's module numbers, positions without the class token, mean or attention pooling, stacked blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.flax import NUMERICS, attention_rows, dense, infer_vit, norm, numbering, unstack, vit_rows
from vitrail.checkpoints.format import PLAIN, Format
from vitrail.checkpoints.infer_config import Hints, Shapes
from vitrail.checkpoints.mapping import Row, head_rules, rename, row
from vitrail.models import ModelConfig, ViTConfig

_POSITIONS = "pos_embedding"
_POOL = "MAPHead_0/MultiHeadDotProductAttention_0"


def _matches(names: Collection[str]) -> bool:
    return "embedding/kernel" in names and "conv_root/kernel" not in names and any(n.startswith("Transformer/") for n in names)


def _normalise_names(archive: Archive) -> None:
    unstack(archive)
    rename(archive, numbering(linen=True), "module numbers from before Linen converted to Linen's")
    rename(
        archive, [(r"^Transformer/(?:posembed_input/)?pos_embedding$", _POSITIONS)], "position embedding found under an older name"
    )
    inlined = r"^(probe$|MlpBlock_0/|MultiHeadDotProductAttention_0/|LayerNorm_0/)"
    rename(archive, [(inlined, r"MAPHead_0/\g<1>")], "attention-pooling head found under an older name")


def _infer_config(shapes: Shapes, hints: Hints) -> ModelConfig:
    fields: dict[str, Any] = {"position": "learned" if _POSITIONS in shapes else "sincos2d", "position_std": None}
    if "MAPHead_0/probe" in shapes:
        fields["pooling"] = "map"
    return infer_vit(shapes, hints, linen=True, positions=_POSITIONS, **fields)


def _rows(config: ModelConfig) -> list[Row]:
    assert isinstance(config, ViTConfig)
    into, bias, _ = head_rules(config.heads)
    return [
        *vit_rows(config, linen=True, positions=_POSITIONS),
        row("pool.probe", "MAPHead_0/probe"),
        row("pool.q.weight", f"{_POOL}/query/kernel", into),
        row("pool.q.bias", f"{_POOL}/query/bias", bias),
        *attention_rows("pool", _POOL, config.heads, fused=("key", "value"), name="kv"),
        *norm("pool.norm", "MAPHead_0/LayerNorm_0"),
        *dense("pool.mlp.up", "MAPHead_0/MlpBlock_0/Dense_0"),
        *dense("pool.mlp.down", "MAPHead_0/MlpBlock_0/Dense_1"),
    ]


def _numerics(config: ModelConfig) -> dict[str, Any]:
    assert isinstance(config, ViTConfig)
    return {**NUMERICS, "class_token": config.pooling == "class"}


BIG_VISION = Format(
    name="big-vision",
    title="big_vision",
    container="npz",
    matches=_matches,
    normalise_names=_normalise_names,
    infer_config=_infer_config,
    rows=_rows,
    numerics=_numerics,
    preset="big-vision",
    supports={
        **PLAIN,
        "position": ("learned", "sincos2d"),
        "final_norm": ("before-pool",),
        "distill_token": (False,),
        "registers": (0,),
        "layer_scale": (None,),
    },
)
