"""big_vision's .npz files: Linen's numbering, positions without a class slot, mean or attention pooling, stacked blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.flax import NUMERICS, attention_rows, dense, infer_vit, norm, numbering, unstack, vit_rows
from vitrail.checkpoints.format import PLAIN, Format
from vitrail.checkpoints.infer import Hints, Shapes
from vitrail.checkpoints.mapping import Row, head_rules, rename, row
from vitrail.models import ModelConfig, ViTConfig

_POSITIONS = "pos_embedding"
_POOL = "MAPHead_0/MultiHeadDotProductAttention_0"


def _recognise(names: Collection[str]) -> bool:
    return "embedding/kernel" in names and "conv_root/kernel" not in names and any(n.startswith("Transformer/") for n in names)


def _respell(archive: Archive) -> None:
    unstack(archive)
    rename(archive, numbering(linen=True), "module numbers from before Linen read as Linen's")
    rename(archive, [(r"^Transformer/(?:posembed_input/)?pos_embedding$", _POSITIONS)], "position table found at its older place")
    inlined = r"^(probe$|MlpBlock_0/|MultiHeadDotProductAttention_0/|LayerNorm_0/)"
    rename(archive, [(inlined, r"MAPHead_0/\g<1>")], "attention-pooling head found at its older place")


def _infer(shapes: Shapes, hints: Hints) -> ModelConfig:
    fields: dict[str, Any] = {"position": "learned" if _POSITIONS in shapes else "sincos2d", "position_std": None}
    if "MAPHead_0/probe" in shapes:
        fields["pooling"] = "map"
    return infer_vit(shapes, hints, linen=True, positions=_POSITIONS, **fields)


def _table(config: ModelConfig) -> list[Row]:
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
    recognise=_recognise,
    respell=_respell,
    infer=_infer,
    table=_table,
    numerics=_numerics,
    preset="big-vision",
    needs={
        **PLAIN,
        "position": ("learned", "sincos2d"),
        "final_norm": ("before-pool",),
        "distill_token": (False,),
        "registers": (0,),
        "layer_scale": (None,),
    },
)
