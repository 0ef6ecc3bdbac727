"""Initial values: "paper" as the reference code draws them, "small" as timm and DeiT do.

The reference's Xavier values make sharp attention at the start and rely on a long warm-up. In short runs on small data the small
values learn faster.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitrail.models.attention import Attention, AttentionPool
from vitrail.models.bit import BiT
from vitrail.models.config import Init
from vitrail.models.layers import LayerScale, Mlp, PatchEmbedding
from vitrail.models.resnet import PostActivationUnit, StandardisedConv
from vitrail.models.vit import ViT

# The standard deviation of a standard normal truncated at ±2: dividing by it restores 1.
_TRUNCATED_NORMAL_STD = 0.87962566103423978


@torch.no_grad()
def initialise(model: ViT | BiT, seed: int | None = None) -> None:
    """Fill every parameter: from torch's global generator, or with `seed` from one of its own."""
    device = next(model.parameters()).device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    initialise_parts(model, generator, model.config.init if isinstance(model, ViT) else "paper")
    if isinstance(model, ViT):
        _initialise_vit(model, generator)
    elif isinstance(model.head, nn.Linear):
        nn.init.zeros_(model.head.weight)
        nn.init.constant_(model.head.bias, model.config.head_bias)


@torch.no_grad()
def initialise_parts(model: nn.Module, generator: torch.Generator | None, init: Init) -> None:
    """Fill norms, attention, MLPs and embeddings, wherever they are in a module."""
    for module in model.modules():
        if init == "small":
            _initialise_small(module, generator)
        else:
            _initialise_module(module, generator)


def _initialise_small(module: nn.Module, generator: torch.Generator | None) -> None:
    if isinstance(module, PatchEmbedding):
        bound = 1 / math.sqrt(module.weight[0].numel())  # torch's default for Conv2d: a standard deviation of bound / √3
        nn.init.uniform_(module.weight, -bound, bound, generator=generator)
        nn.init.uniform_(module.bias, -bound, bound, generator=generator)
    elif isinstance(module, (Attention, AttentionPool, Mlp)):
        for layer in module.children():
            if isinstance(layer, nn.Linear):
                _small_linear(layer, generator)
        if isinstance(module, AttentionPool):
            nn.init.trunc_normal_(module.probe, std=module.probe.shape[-1] ** -0.5, generator=generator)
    else:
        _initialise_module(module, generator)


def _initialise_module(module: nn.Module, generator: torch.Generator | None) -> None:
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, PatchEmbedding):
        lecun_normal_(module.weight, generator)
        nn.init.zeros_(module.bias)
    elif isinstance(module, StandardisedConv):
        lecun_normal_(module.weight, generator)
    elif isinstance(module, (Attention, AttentionPool)):
        _initialise_attention(module, generator)
    elif isinstance(module, Mlp):
        for layer in (module.up, module.down):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.normal_(layer.bias, std=1e-6, generator=generator)


def _initialise_attention(module: Attention | AttentionPool, generator: torch.Generator | None) -> None:
    """Each of the q, k, v matrices is square to the initialiser, though they are stored as one."""
    entering = (module.qkv,) if isinstance(module, Attention) else (module.q, module.kv)
    for layer in (*entering, module.out):
        for square in layer.weight.split(layer.in_features):
            nn.init.xavier_uniform_(square, generator=generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    if isinstance(module, AttentionPool):
        nn.init.xavier_uniform_(module.probe[0].T, generator=generator)


def _initialise_vit(model: ViT, generator: torch.Generator | None) -> None:
    config, small = model.config, model.config.init == "small"
    if model.class_token is not None and not small:
        nn.init.zeros_(model.class_token)
    for token in (model.class_token if small else None, model.distill_token, model.registers):
        if token is not None:
            nn.init.normal_(token, std=0.02, generator=generator)
    model.positions.reset(config.width**-0.5 if config.position_std is None else config.position_std, generator)
    if model.pre_logits is not None:
        (small_normal_ if small else lecun_normal_)(model.pre_logits.weight, generator)
        nn.init.zeros_(model.pre_logits.bias)
    for head in (model.head, model.distill_head):
        if isinstance(head, nn.Linear):
            if small:
                small_normal_(head.weight, generator)
            else:
                nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, config.head_bias)
    for module in model.modules():
        if isinstance(module, LayerScale):
            nn.init.constant_(module.weight, config.layer_scale or 0.0)
        elif isinstance(module, PostActivationUnit):
            nn.init.zeros_(module.norm3.weight)  # a unit begins as its shortcut


def _small_linear(layer: nn.Linear, generator: torch.Generator | None) -> None:
    small_normal_(layer.weight, generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def small_normal_(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Normal of standard deviation .02. timm truncates it at ±2, a hundred deviations: in effect not at all."""
    return nn.init.trunc_normal_(weight, std=0.02, generator=generator)


def lecun_normal_(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Normal with variance 1/fan-in, truncated at two deviations."""
    std = math.sqrt(1.0 / weight[0].numel()) / _TRUNCATED_NORMAL_STD
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
