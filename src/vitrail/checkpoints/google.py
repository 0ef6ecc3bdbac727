"""The .npz files of Google's vision_transformer (the paper and AugReg): ViTs and hybrids."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vitrail.checkpoints.archive import Archive, StoredTensor
from vitrail.checkpoints.flax import NUMERICS, infer_vit, norm, numbering, vit_rows
from vitrail.checkpoints.format import PLAIN, Format
from vitrail.checkpoints.infer_config import Hints, Shapes, resnet_config
from vitrail.checkpoints.mapping import CONVOLUTION, Row, numbered, rename, row
from vitrail.models import ModelConfig, ViTConfig

_POSITIONS = "Transformer/posembed_input/pos_embedding"

_RESNET: dict[str, Any] = {
    "group_norm_eps": 1e-6,
    "standardise": "std+eps",
    "standardise_eps": 1e-5,
    "padding": "same",
    "pool_fill": "-inf",
}

_STEM = [row("resnet.root.weight", "conv_root/kernel", CONVOLUTION), *norm("resnet.norm", "gn_root")]
_UNIT = [
    *(row(f"resnet.stages.{{s}}.{{u}}.conv{k}.weight", f"block{{b}}/unit{{v}}/conv{k}/kernel", CONVOLUTION) for k in (1, 2, 3)),
    *(r for k in (1, 2, 3) for r in norm(f"resnet.stages.{{s}}.{{u}}.norm{k}", f"block{{b}}/unit{{v}}/gn{k}")),
    row("resnet.stages.{s}.{u}.projection.weight", "block{b}/unit{v}/conv_proj/kernel", CONVOLUTION),
    *norm("resnet.stages.{s}.{u}.projection_norm", "block{b}/unit{v}/gn_proj"),
]


def _matches(names: Collection[str]) -> bool:
    stacked = any(name.startswith(("Transformer/encoderblock/", "MAPHead_0/", "probe")) for name in names)
    return "embedding/kernel" in names and _POSITIONS in names and not stacked


def _normalise_names(archive: Archive) -> None:
    rename(archive, numbering(linen=False), "Linen's module numbers converted to the older ones")
    flatten_group_norms(archive)


def flatten_group_norms(archive: Archive) -> None:
    """Flatten GroupNorm vectors, which some files store as (1, 1, 1, C)."""
    for name, tensor in archive.tensors.items():
        if len(tensor.shape) == 4 and tensor.shape[:3] == (1, 1, 1) and name.endswith(("/scale", "/bias", "/gamma", "/beta")):
            archive.tensors[name] = StoredTensor(tensor.shape[3:], tensor.dtype, lambda read=tensor.read: read().reshape(-1))  # type: ignore[misc]


def _infer_config(shapes: Shapes, hints: Hints) -> ModelConfig:
    if "conv_root/kernel" not in shapes:
        return infer_vit(shapes, hints, linen=False, positions=_POSITIONS, covers_prefix=True)
    _, _, channels, root = shapes("conv_root/kernel", 4)
    blocks = shapes.count("block{}/unit1/conv1/kernel", start=1)
    layers = tuple(shapes.count(f"block{b}/unit{{}}/conv1/kernel", start=1) for b in range(1, blocks + 1))
    resnet = resnet_config(layers, root, _RESNET, shapes.path)
    return infer_vit(shapes, hints, linen=False, positions=_POSITIONS, covers_prefix=True, resnet=resnet, channels=channels)


def _rows(config: ModelConfig) -> list[Row]:
    assert isinstance(config, ViTConfig)
    layers = config.resnet.layers if config.resnet else ()
    units = [numbered(_UNIT, s=s, u=u, b=s + 1, v=u + 1) for s, count in enumerate(layers) for u in range(count)]
    return [*vit_rows(config, linen=False, positions=_POSITIONS), *_STEM, *(r for unit in units for r in unit)]


def _numerics(config: ModelConfig) -> dict[str, Any]:
    pooling = "class" if getattr(config, "class_token", False) else "mean"
    return {**NUMERICS, "pooling": pooling, **(_RESNET if getattr(config, "resnet", None) else {})}


GOOGLE = Format(
    name="google",
    title="Google's vision_transformer",
    container="npz",
    matches=_matches,
    normalise_names=_normalise_names,
    infer_config=_infer_config,
    rows=_rows,
    numerics=_numerics,
    preset="google-vit",
    families=("vit", "hybrid"),
    supports={
        **PLAIN,
        "position": ("learned",),
        "position_prefix": (True,),
        "pooling": ("class", "mean"),
        "final_norm": ("before-pool",),
        "distill_token": (False,),
        "registers": (0,),
        "layer_scale": (None,),
    },
)
