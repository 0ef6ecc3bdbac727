"""What timm's architectures compute beyond what their tensors show: heads, GELU, pooling, order of norms.

timm's config.json names an architecture and the arguments that differ from it. Two architectures can have the same tensors and
compute different functions, so a name that is not listed here is rejected. The list follows timm 1.0; timm itself is not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vitrail.errors import VitrailError, did_you_mean


@dataclass(frozen=True)
class Architecture:
    heads: int | None  # None: a BiT
    pool: Literal["token", "avg", "map"] | None = None  # None: not set, so a pretrained_cfg may set it; timm's default is "token"
    gelu: Literal["erf", "tanh"] = "erf"
    pool_include_prefix: bool = False


def _table(*rows: tuple[Architecture, str]) -> dict[str, Architecture]:
    return {name: architecture for architecture, names in rows for name in names.split()}


_SUPPORTED = _table(
    (Architecture(None), "resnetv2_50x1_bit resnetv2_50x3_bit resnetv2_101x1_bit resnetv2_101x3_bit"),
    (Architecture(None), "resnetv2_152x2_bit resnetv2_152x4_bit"),
    (Architecture(2), "test_vit"),
    (Architecture(2, "avg"), "test_vit2"),
    (Architecture(3, "map", pool_include_prefix=True), "test_vit3"),
    (Architecture(3), "deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_384"),
    (Architecture(3), "vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384"),
    (Architecture(4, "avg"), "vit_wee_patch16_reg1_gap_256"),
    (Architecture(5, "avg"), "vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256"),
    (Architecture(6), "deit_small_patch16_224 deit_small_distilled_patch16_224 deit3_small_patch16_224 deit3_small_patch16_384"),
    (Architecture(6), "flexivit_small vit_small_patch8_224 vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2"),
    (Architecture(6), "vit_small_patch16_224 vit_small_patch16_384 vit_small_patch16_36x1_224 vit_small_patch32_224"),
    (Architecture(6), "vit_small_patch32_384 vit_small_r26_s32_224 vit_small_r26_s32_384"),
    (Architecture(8), "deit3_medium_patch16_224"),
    (Architecture(8, "avg"), "vit_medium_patch16_gap_240 vit_medium_patch16_gap_256 vit_medium_patch16_gap_384"),
    (Architecture(8, "avg"), "vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256"),
    (Architecture(8, "avg"), "vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384"),
    (Architecture(10, "avg"), "vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256"),
    (Architecture(10, "avg"), "vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384"),
    (Architecture(12), "deit_base_patch16_224 deit_base_patch16_384 deit_base_distilled_patch16_224"),
    (Architecture(12), "deit_base_distilled_patch16_384 deit3_base_patch16_224 deit3_base_patch16_384 flexivit_base"),
    (Architecture(12), "vit_base_patch8_224 vit_base_patch14_dinov2 vit_base_patch14_reg1_tipsv2 vit_base_patch14_reg4_dinov2"),
    (Architecture(12), "vit_base_patch16_224 vit_base_patch16_224_miil vit_base_patch16_384 vit_base_patch32_224"),
    (Architecture(12), "vit_base_patch32_384 vit_base_r26_s32_224 vit_base_r50_s16_224 vit_base_r50_s16_384"),
    (Architecture(12, "avg"), "vit_base_patch16_reg4_gap_256 vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256"),
    (Architecture(12, "avg"), "vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512"),
    (Architecture(12, "avg", "tanh"), "vit_base_patch32_siglip_gap_256"),
    (Architecture(12, "map"), "vit_base_patch16_siglip_224 vit_base_patch16_siglip_256"),
    (Architecture(12, "map"), "vit_base_patch16_siglip_384 vit_base_patch16_siglip_512"),
    (Architecture(12, "map", "tanh"), "vit_base_patch32_siglip_256"),
    (Architecture(13, "avg"), "vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384"),
    (Architecture(13, "avg"), "vit_so150m2_patch16_reg1_gap_448"),
    (Architecture(14), "vit_base_patch16_plus_240 vit_base_patch32_plus_256"),
    (Architecture(14, "avg"), "vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384"),
    (Architecture(16), "deit3_large_patch16_224 deit3_large_patch16_384 deit3_huge_patch14_224 flexivit_large"),
    (Architecture(16), "vit_large_patch14_224 vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2"),
    (Architecture(16), "vit_large_patch14_reg4_dinov2 vit_large_patch16_224 vit_large_patch16_384 vit_large_patch32_224"),
    (Architecture(16), "vit_large_patch32_384 vit_large_r50_s32_224 vit_large_r50_s32_384 vit_so400m_patch14_reg1_tipsv2"),
    (Architecture(16), "vit_huge_patch14_224 vit_giant_patch14_224 vit_gigantic_patch14_224"),
    (Architecture(16, "avg"), "eva_large_patch14_196 eva_large_patch14_336 vit_base_patch16_gap_224 vit_huge_patch14_gap_224"),
    (Architecture(16, "avg"), "vit_huge_patch16_gap_448 vit_giant_patch16_gap_224 vit_large_patch16_siglip_gap_256"),
    (Architecture(16, "avg"), "vit_large_patch16_siglip_gap_384 vit_so400m_patch14_siglip_gap_224"),
    (Architecture(16, "avg"), "vit_so400m_patch14_siglip_gap_378 vit_so400m_patch14_siglip_gap_384"),
    (Architecture(16, "avg"), "vit_so400m_patch14_siglip_gap_448 vit_so400m_patch14_siglip_gap_896"),
    (Architecture(16, "avg", "tanh"), "vit_large_patch16_siglip_gap_512 vit_so400m_patch16_siglip_gap_256"),
    (Architecture(16, "avg", "tanh"), "vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512"),
    (Architecture(16, "avg", "tanh"), "vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384"),
    (Architecture(16, "map"), "vit_large_patch16_siglip_256 vit_large_patch16_siglip_384 vit_so400m_patch14_siglip_224"),
    (Architecture(16, "map"), "vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384"),
    (Architecture(16, "map", "tanh"), "vit_large_patch16_siglip_512 vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384"),
    (Architecture(16, "map", "tanh"), "vit_so400m_patch16_siglip_512 vit_giantopt_patch16_siglip_256"),
    (Architecture(16, "map", "tanh"), "vit_giantopt_patch16_siglip_384"),
)

# Patterns of the other names, and how these models differ from those that Vitrail computes.
_REJECTED = {
    r"vit_.*_clip_.*": "it normalises tokens before the first block, as CLIP does",
    r"aimv2_.*": "it has RMSNorm and SwiGLU layers",
    r"test_vit4": "it has RMSNorm layers",
    r"beit3_.*": "it has further norms inside attention and MLP",
    r"vit_base_patch16_rpn_224": "it normalises after attention and MLP instead of before",
    r"vit_.*_18x2_224|vit_.*_xp_224|vit_pwee_.*": "it runs attention and MLP in parallel",
    r"vit_dlittle_.*|vit_dwee_.*|vit_dpwee_.*": "it has differential attention",
    r"vit_giant_patch14_(dinov2|reg\d_.*)": "it has SwiGLU layers",
    r"vit_intern300m_.*|vit_.*_radio_v\d+": "it has no final norm",
    r"vit_.*_rope_.*|vit_.*_dinov3.*|eva\d*_.*|vit_pe_.*": "it has rotary position embeddings",
    r"vit_(relpos|srelpos)_.*": "its relative position bias is another one than Vitrail's",
    r"vit_so150m_patch16_reg4_map_256": "its attention pooling leaves out the registers",
    r"vit_.*_(resnet\d+d?|mci)_.*": "its convolutional stem has batch norms",
    r"resnetv2_.*": "it is not a BiT: only names that end in _bit are",
}

POOLS = {"token": "class", "avg": "mean", "map": "map"}
# Arguments that tensors show, or that change nothing at inference; then those that must have certain values.
_SHOWN = set(
    "img_size patch_size in_chans num_classes embed_dim depth num_heads mlp_ratio qkv_bias qk_norm init_values class_token "
    "no_embed_class reg_tokens pos_embed fc_norm global_pool drop_rate pos_drop_rate patch_drop_rate proj_drop_rate "
    "attn_drop_rate drop_path_rate weight_init fix_init dynamic_img_size dynamic_img_pad pool_include_prefix".split()
)
_GELUS = {"gelu": "erf", "gelu_tanh": "tanh"}
_VALUES: dict[str, tuple[Any, ...]] = {
    "act_layer": (None, "", *_GELUS),
    "norm_layer": (None, "", "layernorm"),
    "embed_norm_layer": (None, ""),
    "pre_norm": (False,),
    "final_norm": (True,),
    "proj_bias": (True,),
    "scale_attn_norm": (False,),
    "scale_mlp_norm": (False,),
}
_BIT_SHOWN = {"in_chans", "num_classes", "drop_rate", "drop_path_rate", "zero_init_last", "width_factor", "layers"}
_BIT_VALUES: dict[str, tuple[Any, ...]] = {"global_pool": ("avg",), "output_stride": (32,)}


@dataclass(frozen=True)
class Function:
    """What config.json decides and tensors do not show."""

    heads: int | None
    pooling: str  # in our words: "class", "mean" or "map"
    gelu: str
    pool_include_prefix: bool


def function_of(config: Mapping[str, Any]) -> Function:
    """Return what this config.json decides; raise an error if the model computes something that Vitrail cannot."""
    name = str(config.get("architecture"))
    architecture = find_architecture(name)
    arguments = model_arguments(config)
    is_bit = architecture.heads is None
    _check_arguments(name, arguments, *((_BIT_SHOWN, _BIT_VALUES) if is_bit else (_SHOWN, _VALUES)))
    pool = arguments.get("global_pool", _stored_pool(config) or architecture.pool or "token")
    if not is_bit and (not isinstance(pool, str) or pool not in POOLS):
        raise VitrailError(f"config.json has global_pool={pool!r} for {name}; only {', '.join(POOLS)} are supported.")
    act = arguments.get("act_layer")
    return Function(
        arguments.get("num_heads", architecture.heads),
        "mean" if is_bit else POOLS[pool],
        _GELUS[act] if act else architecture.gelu,
        bool(arguments.get("pool_include_prefix", architecture.pool_include_prefix)),
    )


def _stored_pool(config: Mapping[str, Any]) -> Any:
    """Return the pooling of the saved model: timm's `save_for_hf` writes it next to `model_args`, which many folders lack."""
    pretrained = config.get("pretrained_cfg")
    stored = pretrained.get("global_pool") if isinstance(pretrained, Mapping) else None
    return config.get("global_pool") or stored


def find_architecture(name: str) -> Architecture:
    """Look up a name, which may have a tag, or be one that timm used before it had tags."""
    bare = name.partition(".")[0]
    plain = re.sub(r"_(in21k|in21ft1k|sam|dino)$", "", bare.replace("_bitm", "_bit"))
    for known in (bare, plain):
        if known in _SUPPORTED:
            return _SUPPORTED[known]
    why = next((reason for pattern, reason in _REJECTED.items() if re.fullmatch(pattern, bare)), None)
    if why:
        raise VitrailError(f"config.json names timm's architecture {name!r}, which is not supported: {why}.")
    raise VitrailError(
        f"config.json names timm's architecture {name!r}, which is not in Vitrail's list.{did_you_mean(bare, _SUPPORTED)} "
        f"Its tensors alone do not show its GELU, norms and pooling. If it computes the same function as an architecture of "
        f"the list, write that name in config.json."
    )


def model_arguments(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the arguments that differ from the architecture's own."""
    arguments = (config or {}).get("model_args") or {}
    return arguments if isinstance(arguments, Mapping) else {}


def _check_arguments(name: str, arguments: Mapping[str, Any], shown: set[str], values: Mapping[str, tuple[Any, ...]]) -> None:
    for key, value in arguments.items():
        if key in shown:
            continue
        if key not in values:
            raise VitrailError(f"config.json has the argument {key}={value!r} for {name}, which is not supported.")
        if value not in values[key]:
            allowed = " or ".join(repr(one) for one in values[key] if one not in (None, ""))
            expected = f"only {allowed} is supported" if allowed else "it is not supported"
            raise VitrailError(f"config.json has {key}={value!r} for {name}; {expected}.")
