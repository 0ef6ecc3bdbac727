"""Hugging Face's DeiT, DINOv2 and SigLIP vision towers: their names as those of its ViT, and which other models are rejected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vitrail.checkpoints.archive import Archive, StoredTensor
from vitrail.checkpoints.mapping import add_class_position, rename
from vitrail.errors import VitrailError

# model_type → its defaults for what config.json may leave out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": {"hidden_act": "gelu", "layer_norm_eps": 1e-12},
    "deit": {"hidden_act": "gelu", "layer_norm_eps": 1e-12},
    "dinov2": {"hidden_act": "gelu", "layer_norm_eps": 1e-6},
    "dinov2_with_registers": {"hidden_act": "gelu", "layer_norm_eps": 1e-6},
    "siglip_vision_model": {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
_REASONS = {
    "clip": "CLIP normalises tokens before the first block and has another GELU",
    "clip_vision_model": "CLIP normalises tokens before the first block and has another GELU",
    "bit": "load the same weights in timm's or Google's format",
    "vit-hybrid": "load the same weights in timm's or Google's format",
    "siglip": "it has an image and a text tower; save its vision_model alone",
    "dinov3_vit": "it has rotary positions",
    "beit": "it has relative positions in every layer",
    "vit_mae": "load Facebook's own file, whose decoder is left out",
}
_PREFIXES = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.", "vision_model.")
_STARTS = ("embeddings.patch_embeddings.projection.weight", "embeddings.patch_embedding.weight")
_LAYER = r"^encoder\.layers?\.(\d+)\."
_DINOV2 = [
    (_LAYER + r"norm1\.", r"encoder.layer.\1.layernorm_before."),
    (_LAYER + r"norm2\.", r"encoder.layer.\1.layernorm_after."),
    (_LAYER + r"mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (_LAYER + r"mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
]
_SIGLIP = [
    (r"^embeddings\.patch_embedding\.", "embeddings.patch_embeddings.projection."),
    (r"^embeddings\.position_embedding\.weight$", "embeddings.position_embeddings"),
    (_LAYER + r"layer_norm1\.", r"encoder.layer.\1.layernorm_before."),
    (_LAYER + r"layer_norm2\.", r"encoder.layer.\1.layernorm_after."),
    (_LAYER + r"self_attn\.q_proj\.", r"encoder.layer.\1.attention.attention.query."),
    (_LAYER + r"self_attn\.k_proj\.", r"encoder.layer.\1.attention.attention.key."),
    (_LAYER + r"self_attn\.v_proj\.", r"encoder.layer.\1.attention.attention.value."),
    (_LAYER + r"self_attn\.out_proj\.", r"encoder.layer.\1.attention.output.dense."),
    *_DINOV2[2:],
    (r"^post_layernorm\.", "layernorm."),
]
_TABLE = "embeddings.position_embeddings"


def check_model_type(config: Mapping[str, Any]) -> None:
    """Raise an error that names a model of transformers which is not read."""
    kind = config.get("model_type")
    if kind is None or "architecture" in config or kind in DEFAULTS:
        return
    reason = f" ({_REASONS[kind]})" if isinstance(kind, str) and kind in _REASONS else ""
    raise VitrailError(f"config.json has model_type={kind!r}, which is not supported{reason}. Supported: {', '.join(DEFAULTS)}.")


def matches(names: Collection[str]) -> bool:
    return any(start in names or any(prefix + start in names for prefix in _PREFIXES) for start in _STARTS)


def normalise_variant(archive: Archive) -> None:
    """Give the tensors of DeiT, DINOv2 and SigLIP the names and layout of Hugging Face's ViT; `archive.variant` says whose."""
    rename(archive, [(rf"^{prefix[:-1]}\.", "") for prefix in _PREFIXES])
    tensors = archive.tensors
    if "embeddings.patch_embedding.weight" in tensors:
        archive.variant = "siglip_vision_model"
        rename(archive, _SIGLIP, "names of SigLIP's vision tower converted to those of ViT")
        _add_axis(archive)
        _split_pool(archive)
    elif "encoder.layer.0.layer_scale1.lambda1" in tensors:
        archive.variant = "dinov2"
        rename(archive, _DINOV2, "names of DINOv2 converted to those of ViT")
        if "embeddings.register_tokens" in tensors:
            add_class_position(archive, "embeddings.cls_token", _TABLE)
    elif "embeddings.distillation_token" in tensors:
        archive.variant = "deit"
        if "cls_classifier.weight" in tensors:
            rename(archive, [(r"^cls_classifier\.", "classifier.")])
        else:  # only the class token is classified: the other token is one more input, as a register is
            rename(
                archive,
                [(r"^embeddings\.distillation_token$", "embeddings.register_tokens")],
                "DeiT's distillation token, which this model has no head for, was read as a register",
            )


def _add_axis(archive: Archive) -> None:
    table = archive.tensors.get(_TABLE)
    if table is not None and len(table.shape) == 2:
        archive.tensors[_TABLE] = StoredTensor((1, *table.shape), table.dtype, lambda: table.read()[None])


def _split_pool(archive: Archive) -> None:
    """Split the fused projection of the pooling head: queries are a layer of their own in ours."""
    for kind in ("weight", "bias"):
        fused = archive.tensors.pop(f"head.attention.in_proj_{kind}", None)
        if fused is None or not fused.shape:
            continue
        width = fused.shape[0] // 3

        def part(start: int, stop: int, fused: StoredTensor = fused) -> StoredTensor:
            return StoredTensor((stop - start, *fused.shape[1:]), fused.dtype, lambda: fused.read()[start:stop].contiguous())

        archive.tensors[f"head.attention.q.{kind}"] = part(0, width)
        archive.tensors[f"head.attention.kv.{kind}"] = part(width, fused.shape[0])
