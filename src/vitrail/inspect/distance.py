"""Mean attention distance by depth and head (Fig. 7 right, Fig. 11), and what single heads look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array, Images, check_patch, checked_vit, finite, in_batches
from vitrail.models import ViT
from vitrail.models.config import ViTConfig
from vitrail.models.features import chosen_layers

Among = Literal["patches", "all"]


def attention_distance(
    model: nn.Module,
    images: Images,
    *,
    among: Among = "patches",
    layers: Iterable[int] | None = None,
    batch: int | None = None,
) -> Array:
    """How far heads look, in pixels of the input: [layer, head].

    For every patch as query, the Euclidean distance to every patch as key, averaged with the attention as weight; then the mean
    over queries and images. A key that is a prefix token (class, distillation, registers) lies nowhere. `among="patches"`, the
    default, leaves its share out, so that the weights of each query sum to one: a true weighted average. `among="all"` keeps
    the share and counts it as distance 0, as much circulated code does; it is never larger.
    """
    if among not in ("patches", "all"):
        raise VitrailError(f"among is {among!r}; it can be 'patches' or 'all'.")
    return attention_distances(model, images, layers=layers, batch=batch)[among]


def attention_distances(
    model: nn.Module, images: Images, *, layers: Iterable[int] | None = None, batch: int | None = None
) -> dict[Among, Array]:
    """`attention_distance` by both conventions from one pass."""
    vit = checked_vit(model)
    chosen = chosen_layers(layers, len(vit.blocks))
    measure = _measure(vit.config).to(vit.norm.weight.device)
    total, seen = torch.zeros(2, len(chosen), vit.config.heads, dtype=torch.float64), 0
    for part in in_batches(vit, images, batch):
        seen += len(part)
        means = [_query_means(weights, measure, vit.config.prefix) for _, weights in vit.attention(part, chosen)]
        total += torch.stack(means, dim=1).cpu().double().sum(dim=2)  # one transfer a batch: each would wait for the device
    patches, everything = finite((total / seen).numpy(), "The attention distance")
    return {"patches": patches, "all": everything}


def _measure(config: ViTConfig) -> Tensor:
    """[query, key, 2]: by what to multiply attention and sum over keys to get a distance, and the share of the patches."""
    measure = torch.zeros(config.tokens, config.tokens, 2)
    measure[config.prefix :, config.prefix :, 0] = patch_distances(config)
    measure[:, config.prefix :, 1] = 1.0
    return measure


def _query_means(weights: Tensor, measure: Tensor, prefix: int) -> Tensor:
    """[convention, image, head]: the mean over patch queries. The attention is read once and nothing of its size is made."""
    travelled, share = torch.einsum("bhij,ijc->cbhi", weights, measure)[..., prefix:]
    # A query that looks only at prefix tokens has no distance among patches: 0 / 0 counts as 0.
    return torch.stack([travelled / share.clamp(min=1e-30), travelled]).mean(dim=-1)


def patch_distances(config: ViTConfig) -> Tensor:
    """Distances between the centres of all patches in pixels of the input, [patch, patch]; a hybrid's tokens likewise."""
    y, x = torch.meshgrid(
        *(torch.arange(count) * float(stride) for count, stride in zip(config.grid, config.stride, strict=True)), indexing="ij"
    )
    centres = torch.stack([y.flatten(), x.flatten()], dim=1).double()
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").float()


def uniform_distance(config: ViTConfig) -> float:
    """The mean distance of a head that looks at all patches alike: the level at which attention is global."""
    return float(patch_distances(config).double().mean())


def head_attention(
    model: nn.Module,
    images: Images,
    query: tuple[int, int] | int,
    *,
    layers: Iterable[int] | None = None,
    batch: int | None = None,
) -> Array:
    """What each head attends to from one query: [image, layer, head, row, column], the shares of the patches.

    `query` is a patch as (row, column), or a prefix token by its number: 0 is the class token. The shares sum to one less what
    goes to prefix tokens.
    """
    vit = checked_vit(model)
    token = check_patch(vit, query) if isinstance(query, tuple) else _prefix_token(vit, query)
    chosen = chosen_layers(layers, len(vit.blocks))
    parts = []
    for part in in_batches(vit, images, batch):
        found = [weights[:, :, token, vit.config.prefix :].cpu() for _, weights in vit.attention(part, chosen)]
        parts.append(torch.stack(found, dim=1).unflatten(-1, vit.config.grid).numpy())
    return finite(np.concatenate(parts), "The attention")


def _prefix_token(model: ViT, number: int) -> int:
    count = model.config.prefix
    if not 0 <= number < count:
        found = f"has {count} prefix tokens, numbered 0 to {count - 1}" if count else "has no prefix tokens"
        raise VitrailError(f"There is no prefix token {number}: {model.config.name} {found}. A patch is named as (row, column).")
    return number
