"""Weights of other libraries under our names, written down independently of the checkpoint readers."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that leave no part of a network without effect: no zeros, no unit scales, activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("weight") and parameter.ndim == 1:
            parameter.data = 1.0 + 0.2 * noise
        elif parameter.ndim == 1:
            parameter.data = 0.2 * noise
        elif name.endswith("weight") and parameter.ndim in (2, 4):
            parameter.data = noise / parameter[0].numel() ** 0.5
        else:
            parameter.data = 0.5 * noise
    return model.eval()


def renamed(state: dict[str, Tensor], rules: list[tuple[str, str]]) -> dict[str, Tensor]:
    result = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        result[key] = value
    return result


def load(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    model.load_state_dict({key: value.reshape(model.state_dict()[key].shape) for key, value in state.items()}, strict=True)
    return model.eval()


TIMM = [
    (r"^cls_token$", "class_token"),
    (r"^dist_token$", "distill_token"),
    (r"^reg_token$", "registers"),
    (r"^pos_embed$", "positions.table"),
    (r"^patch_embed\.proj\.", "patches."),
    (r"\.attn\.proj\.", ".attention.out."),
    (r"\.attn\.qkv\.", ".attention.qkv."),
    (r"\.attn\.([qk])_norm\.", r".attention.\1_norm."),
    (r"\.ls([12])\.gamma$", r".scale\1.weight"),
    (r"mlp\.fc1\.", "mlp.up."),
    (r"mlp\.fc2\.", "mlp.down."),
    (r"^fc_norm\.", "norm."),
    (r"^attn_pool\.latent$", "pool.probe"),
    (r"^attn_pool\.proj\.", "pool.out."),
    (r"^attn_pool\.", "pool."),
    (r"^head_dist\.", "distill_head."),
]
TIMM_RESNET = [
    (r"^stem\.conv\.", "root."),
    (r"^stem\.norm\.", "norm."),
    (r"stages\.(\d+)\.blocks\.(\d+)\.", r"stages.\1.\2."),
    (r"\.downsample\.conv\.", ".projection."),
    (r"\.downsample\.norm\.", ".projection_norm."),
]
TIMM_HYBRID = [
    (r"^patch_embed\.backbone\.stem\.conv\.", "resnet.root."),
    (r"^patch_embed\.backbone\.stem\.norm\.", "resnet.norm."),
    (r"^patch_embed\.backbone\.(0\.)?conv\.", "resnet.root."),
    (r"^patch_embed\.backbone\.(0\.)?norm\.", "resnet.norm."),
    (r"^patch_embed\.backbone\.stages\.", "resnet.stages."),
    *TIMM_RESNET[2:],
    *TIMM,
]
HF = [
    (r"^vit\.", ""),
    (r"^embeddings\.cls_token$", "class_token"),
    (r"^embeddings\.position_embeddings$", "positions.table"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patches."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
    (r"^pooler\.dense\.", "pre_logits."),
]
TORCHVISION = [
    (r"^encoder\.pos_embedding$", "positions.table"),
    (r"^conv_proj\.", "patches."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attention.qkv."),
    (r"\.self_attention\.out_proj\.", ".attention.out."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.up."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.down."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.pre_logits\.", "pre_logits."),
    (r"^heads\.head\.", "head."),
]
