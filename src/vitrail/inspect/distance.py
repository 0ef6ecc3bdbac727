"""Mean attention distance by layer and head (Fig. 7 right, Fig. 11), and attention maps of single heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array, Images, check_patch, checked_vit, config_at, finite, in_batches
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
    """Compute the mean attention distance in pixels of the input: [layer, head].

    For every query patch, the Euclidean distance to every key patch, averaged with the attention as weight; then the mean
    over queries and images. Prefix tokens (class, distillation, registers) have no position. `among="patches"`, the default,
    ignores the attention to them and renormalises, so the weights of each query sum to one. `among="all"` counts it as
    distance 0, as much published code does; that value is never larger.
    """
    if among not in ("patches", "all"):
        raise VitrailError(f"among is {among!r}; it can be 'patches' or 'all'.")
    return attention_distances(model, images, layers=layers, batch=batch)[among]


def attention_distances(
    model: nn.Module, images: Images, *, layers: Iterable[int] | None = None, batch: int | None = None
) -> dict[Among, Array]:
    """Compute `attention_distance` by both conventions in one pass."""
    vit = checked_vit(model)
    chosen = chosen_layers(layers, len(vit.blocks))
    factors = None
    total, count = torch.zeros(2, len(chosen), vit.config.heads, dtype=torch.float64), 0
    for part in in_batches(vit, images, batch):
        if factors is None:
            factors = _distance_factors(config_at(vit, part)).to(part.device)
        count += len(part)
        means = [_query_means(weights, factors, vit.config.prefix) for _, weights in vit.attention(part, chosen)]
        total += torch.stack(means, dim=1).cpu().double().sum(dim=2)  # one transfer per batch, because each synchronises
    patches, all_keys = finite((total / count).numpy(), "the attention distance")
    return {"patches": patches, "all": all_keys}


def _distance_factors(config: ViTConfig) -> Tensor:
    """Build [query, key, 2]: the distance in pixels, and 1 where the key is a patch."""
    factors = torch.zeros(config.tokens, config.tokens, 2)
    factors[config.prefix :, config.prefix :, 0] = patch_distances(config)
    factors[:, config.prefix :, 1] = 1.0
    return factors


def _query_means(attention: Tensor, factors: Tensor, prefix: int) -> Tensor:
    """Average over query patches: [convention, image, head]. Reads the attention once and allocates nothing of its size."""
    distance, patch_weight = torch.einsum("bhij,ijc->cbhi", attention, factors)[..., prefix:]
    # A query that attends only to prefix tokens has no distance among patches: 0 / 0 counts as 0.
    return torch.stack([distance / patch_weight.clamp(min=1e-30), distance]).mean(dim=-1)


def patch_distances(config: ViTConfig) -> Tensor:
    """Compute the distances between the centres of all patches in pixels of the input, [patch, patch]. Hybrids included."""
    y, x = torch.meshgrid(
        *(torch.arange(count) * float(stride) for count, stride in zip(config.grid, config.stride, strict=True)), indexing="ij"
    )
    centres = torch.stack([y.flatten(), x.flatten()], dim=1).double()
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").float()


def uniform_distance(config: ViTConfig) -> float:
    """Compute the mean attention distance of uniform attention over all patches."""
    return float(patch_distances(config).double().mean())


def head_attention(
    model: nn.Module,
    images: Images,
    query: tuple[int, int] | int,
    *,
    layers: Iterable[int] | None = None,
    batch: int | None = None,
) -> Array:
    """Return each head's attention from one query to all patches: [image, layer, head, row, column].

    `query` is a patch as (row, column), or a prefix token by its index: 0 is the class token. The weights of a map sum to one
    minus the attention to prefix tokens.
    """
    vit = checked_vit(model)
    chosen = chosen_layers(layers, len(vit.blocks))
    parts = []
    for part in in_batches(vit, images, batch):
        config = config_at(vit, part)
        token = check_patch(config, query) if isinstance(query, tuple) else _prefix_token(vit, query)
        maps = [weights[:, :, token, vit.config.prefix :].cpu() for _, weights in vit.attention(part, chosen)]
        parts.append(torch.stack(maps, dim=1).unflatten(-1, config.grid).numpy())
    return finite(np.concatenate(parts), "the attention")


def _prefix_token(model: ViT, index: int) -> int:
    count = model.config.prefix
    if not 0 <= index < count:
        existing = "no prefix tokens" if not count else "only prefix token 0" if count == 1 else f"prefix tokens 0 to {count - 1}"
        raise VitrailError(f"There is no prefix token {index}: {model.config.name} has {existing}. Give a patch as (row, column).")
    return index
