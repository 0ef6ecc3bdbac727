"""Attention rolled out from the output to the patches (Fig. 6, Fig. 14), and two other maps to set beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array, Images, check_patch, checked_vit, finite, in_batches
from vitrail.models import ViT
from vitrail.models.features import evaluating


def rollout(model: nn.Module, images: Images, *, batch: int | None = None) -> Array:
    """Attention rollout (Abnar & Zuidema 2020), as the paper draws it: [image, row, column], the share of each patch.

    Each layer is the mean over its heads, half of it replaced by the identity for the residual connection, with rows that sum
    to one; the layers are multiplied from the output to the input. It starts from what the output is made of: the class token
    (with a distillation token, both alike), all patches alike for mean pooling, the probe's attention for MAP pooling. The
    shares of an image sum to one less what ends at prefix tokens.
    """
    vit = checked_vit(model)
    parts = []
    for part in in_batches(vit, images, batch):
        means = [weights.mean(dim=1) for _, weights in vit.attention(part, pooling=True)]
        share = means.pop()
        while means:
            share = share @ _with_residual(means.pop())
        parts.append(_map(vit, share[:, 0]))
    return finite(np.concatenate(parts), "The rollout")


def _with_residual(attention: Tensor) -> Tensor:
    """½A + ½I with rows that sum to one, in place. Rows, not columns: each token's own inputs share one unit."""
    attention.div_(attention.sum(dim=-1, keepdim=True)).mul_(0.5)
    attention.diagonal(dim1=-2, dim2=-1).add_(0.5)
    return attention


def gradient_rollout(
    model: nn.Module, images: Images, outputs: Sequence[int] | Array | Tensor | None = None, *, batch: int | None = None
) -> Array:
    """Gradient-weighted rollout (Chefer et al. 2021), which is **not in the paper**: [image, row, column].

    Heads are weighted by how much their attention raises one output: a layer is the mean over heads of the positive part of
    A ⊙ ∂output/∂A, and adds to what came through the layers above it. `outputs` names an output for each image; without it,
    each image's highest. What starts at a patch and never moves is left out, so that a mean-pooled model's map is no constant.
    The scale is that of the output, not of a share.
    """
    vit = checked_vit(model)
    if outputs is not None and not isinstance(images, (Tensor, np.ndarray)):
        raise VitrailError("`outputs` names one output for each image, so give the images as one batch, not as a stream.")
    asked = None if outputs is None else torch.as_tensor(outputs)
    if asked is not None and len(asked) != len(images):  # type: ignore[arg-type]
        raise VitrailError(f"{len(asked)} outputs are named for {len(images)} images; each image takes one.")  # type: ignore[arg-type]
    parts, seen = [], 0
    for part in in_batches(vit, images, batch):
        chosen = highest_outputs(vit, part) if asked is None else asked[seen : seen + len(part)].to(part.device)
        parts.append(_map(vit, _gradient_share(vit, part, chosen)))
        seen += len(part)
    return finite(np.concatenate(parts), "The gradient-weighted rollout")


def _gradient_share(vit: ViT, images: Tensor, outputs: Tensor) -> Tensor:
    layers = vit.attention_gradients(images, outputs)
    _, pooling, _ = next(layers)
    start = share = pooling.mean(dim=1)
    for _, weights, slopes in layers:
        assert slopes is not None
        share = share + share @ (weights * slopes).clamp(min=0).mean(dim=1)
    return (share - start)[:, 0]


@torch.no_grad()
def highest_outputs(model: ViT, images: Tensor) -> Tensor:
    """Each image's output with the highest value."""
    if not model.config.outputs:
        raise VitrailError(f"{model.config.name} has no head, so it has no output to take gradients of.")
    with evaluating(model):
        return model(images).argmax(dim=1)  # type: ignore[no-any-return]


@torch.no_grad()
def token_similarity(model: nn.Module, images: Images, patch: tuple[int, int] | None = None, *, batch: int | None = None) -> Array:
    """Cosine similarity of the encoder's output tokens, which is **not in the paper**: [image, row, column], −1 to 1.

    How like each patch's final token is to the final token of one `patch` (row, column); or, without one, to the class token
    where the model pools by it, else to the mean of the patches.
    """
    vit = checked_vit(model)
    count = vit.config.prefix
    pooled = 0 if vit.config.pooling == "class" else None
    token = pooled if patch is None else check_patch(vit, patch)
    parts = []
    for part in in_batches(vit, images, batch):
        with evaluating(vit):
            tokens = vit.features(part).tokens.float()
        patches = tokens[:, count:]
        like = patches.mean(dim=1) if token is None else tokens[:, token]
        similarity = torch.cosine_similarity(patches, like[:, None], dim=-1)
        parts.append(similarity.unflatten(1, vit.config.grid).cpu().numpy())
    return finite(np.concatenate(parts), "The token similarity")


def _map(model: ViT, share: Tensor) -> Array:
    patches: Array = share[:, model.config.prefix :].unflatten(1, model.config.grid).float().cpu().numpy()
    return patches
