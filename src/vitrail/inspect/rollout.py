"""Attention rollout (Fig. 6, Fig. 14), and two other maps for comparison: gradient-weighted rollout and token similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError, counted
from vitrail.inspect.inputs import Array, Images, check_patch, checked_vit, config_at, finite, in_batches
from vitrail.models import ViT, ViTConfig
from vitrail.models.features import evaluating

Fusion = Literal["mean", "max", "min"]


def rollout(model: nn.Module, images: Images, *, fusion: Fusion = "mean", residual: bool = True, batch: int | None = None) -> Array:
    """Compute attention rollout (Abnar & Zuidema 2020): [image, row, column], the weight of each patch.

    The defaults are the paper's. For each layer, fuse the attention of the heads (their mean, maximum or minimum), normalise the
    rows, and with `residual` mix with the identity (½A + ½I, for the residual connection); then multiply the layers from the output
    to the input. The start depends on the pooling: the class token (and a distillation token, with equal weight), all patches with
    equal weight for mean pooling, or the attention of the pooling probe for MAP pooling. The weights of an image sum to one minus
    what ends at prefix tokens.
    """
    if fusion not in ("mean", "max", "min"):
        raise VitrailError(f"fusion is {fusion!r}; it can be 'mean', 'max' or 'min'.")
    vit = checked_vit(model)
    parts = []
    for part in in_batches(vit, images, batch):
        layers = [_fused(weights, fusion) for _, weights in vit.attention(part, pooling=True)]
        weights = layers.pop()
        while layers:
            weights = weights @ (_with_residual(layers.pop()) if residual else layers.pop())
        parts.append(_map(config_at(vit, part), weights[:, 0]))
    return finite(np.concatenate(parts), "the rollout")


def _fused(attention: Tensor, fusion: Fusion) -> Tensor:
    """Reduce [image, head, query, key] over heads; rows (queries, not keys) sum to one, or are zero if no two heads agree."""
    fused = attention.mean(dim=1) if fusion == "mean" else attention.amax(dim=1) if fusion == "max" else attention.amin(dim=1)
    return fused.div_(fused.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(fused.dtype).tiny))


def _with_residual(attention: Tensor) -> Tensor:
    """Compute ½A + ½I in place."""
    attention.mul_(0.5).diagonal(dim1=-2, dim2=-1).add_(0.5)
    return attention


def gradient_rollout(
    model: nn.Module, images: Images, outputs: Sequence[int] | Array | Tensor | None = None, *, batch: int | None = None
) -> Array:
    """Compute gradient-weighted rollout (Chefer et al. 2021), which is **not in the paper**: [image, row, column].

    Attention is weighted by how much it raises one output: each layer contributes the mean over heads of the positive part of
    A ⊙ ∂output/∂A, added to the relevance from the layers above. `outputs` gives one output index per image; default: the
    highest output of each image. The starting relevance is subtracted, so that the map of a mean-pooled model is not almost
    constant. Values are in units of the output and do not sum to one.
    """
    vit = checked_vit(model)
    if outputs is not None and not isinstance(images, (Tensor, np.ndarray)):
        raise VitrailError("`outputs` needs one output per image, so pass the images as one batch, not as an iterable of batches.")
    given = None if outputs is None else torch.as_tensor(outputs)
    if given is not None and len(given) != len(images):  # type: ignore[arg-type]
        raise VitrailError(
            f"`outputs` has length {len(given)} for {counted(len(images), 'image')}; pass one per image."  # type: ignore[arg-type]
        )
    parts, start = [], 0
    for part in in_batches(vit, images, batch):
        chosen = highest_outputs(vit, part) if given is None else given[start : start + len(part)].to(part.device)
        parts.append(_map(config_at(vit, part), _gradient_relevance(vit, part, chosen)))
        start += len(part)
    return finite(np.concatenate(parts), "the gradient-weighted rollout")


def _gradient_relevance(vit: ViT, images: Tensor, outputs: Tensor) -> Tensor:
    layers = vit.attention_gradients(images, outputs)
    _, pooling, _ = next(layers)
    initial = relevance = pooling.mean(dim=1)
    for _, weights, grads in layers:
        assert grads is not None
        relevance = relevance + relevance @ (weights * grads).clamp(min=0).mean(dim=1)
    return (relevance - initial)[:, 0]


@torch.no_grad()
def highest_outputs(model: ViT, images: Tensor) -> Tensor:
    """Return the index of each image's highest output."""
    if not model.config.outputs:
        raise VitrailError(f"{model.config.name} has no head, so there is no output to differentiate. Use rollout instead.")
    with evaluating(model):
        return model(images).argmax(dim=1)  # type: ignore[no-any-return]


@torch.no_grad()
def token_similarity(model: nn.Module, images: Images, patch: tuple[int, int] | None = None, *, batch: int | None = None) -> Array:
    """Compute the cosine similarity of output tokens, which is **not in the paper**: [image, row, column], −1 to 1.

    Each patch token is compared with the token of one `patch` (row, column). Default: with the class token if the model pools
    by it, else with the mean of the patches.
    """
    vit = checked_vit(model)
    prefix = vit.config.prefix
    default = 0 if vit.config.pooling == "class" else None
    parts = []
    for part in in_batches(vit, images, batch):
        token = default if patch is None else check_patch(config_at(vit, part), patch)
        with evaluating(vit):
            features = vit.features(part)
        tokens = features.tokens.float()
        patches = tokens[:, prefix:]
        reference = patches.mean(dim=1) if token is None else tokens[:, token]
        similarity = torch.cosine_similarity(patches, reference[:, None], dim=-1)
        parts.append(similarity.unflatten(1, features.grid).cpu().numpy())
    return finite(np.concatenate(parts), "the token similarity")


def _map(config: ViTConfig, weights: Tensor) -> Array:
    patches: Array = weights[:, config.prefix :].unflatten(1, config.grid).float().cpu().numpy()
    return patches
