"""Inspect the weights alone: first-layer filters and position similarity (Fig. 7 left and centre)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array, checked_model, checked_vit, finite
from vitrail.models import Model, ViT


class Filters(NamedTuple):
    """The filters of the first layer."""

    components: Array
    """[component, channel, height, width]: principal components of the filters, unit length, strongest first."""
    explained_variance_ratio: Array
    """[component]: the fraction of the filters' variance explained by each component."""
    raw: Array
    """[filter, channel, height, width]: the filters themselves."""


def filters(model: nn.Module, components: int = 28) -> Filters:
    """Compute the principal components of the first-layer filters, 28 as in the paper's Fig. 7.

    For a ViT the filters are the rows of the patch embedding; for hybrids and BiT the ResNet's first convolution, after weight
    standardisation. Filters are centred first. The sign of a component is arbitrary; here its largest entry is positive. There
    are at most as many components as filters, or as entries of a filter.
    """
    if components < 1:
        raise VitrailError(f"components is {components}; use 1 or more.")
    raw = first_filters(checked_model(model))
    finite(raw.numpy(), "the filters")
    flat = raw.flatten(1)
    centred = flat - flat.mean(dim=0)
    _, singular_values, directions = torch.linalg.svd(centred, full_matrices=False)
    largest = directions.abs().argmax(dim=1, keepdim=True)
    directions = directions * directions.gather(1, largest).sign()
    variance = singular_values**2
    ratio = variance / variance.sum().clamp(min=torch.finfo(variance.dtype).tiny)
    count = min(components, len(directions))
    return Filters(
        directions[:count].unflatten(1, raw.shape[1:]).float().numpy(),
        ratio[:count].float().numpy(),
        raw.float().numpy(),
    )


def first_filters(model: Model) -> Tensor:
    """Return the filters [filter, channel, height, width] in float64 on the CPU, so that results do not depend on the device."""
    if isinstance(model, ViT):
        weight = model.patches.weight if model.resnet is None else model.resnet.root.standardised()
    else:
        weight = model.root.standardised()
    return weight.detach().to("cpu", torch.float64)


def position_similarity(model: nn.Module, layer: int = 0, *, image_size: tuple[int, int] | None = None) -> Array:
    """Compute the cosine similarity between the position embeddings of all patches: [row, column, row, column], −1 to 1.

    Prefix tokens are not included. `layer` chooses the embedding of models with one position embedding per layer. With
    `image_size` (height, width) they are those of an image of that size, as a model that accepts any size resamples them.
    """
    unit = position_vectors(checked_vit(model), layer, image_size)
    flat = unit.flatten(0, 1)
    similarity = (flat @ flat.T).unflatten(1, unit.shape[:2]).unflatten(0, unit.shape[:2]).float().numpy()
    return finite(similarity, "the position similarity")


def position_vectors(vit: ViT, layer: int = 0, image_size: tuple[int, int] | None = None) -> Tensor:
    """Return the position embeddings of patches with length 1, [row, column, width], in float64; see `position_similarity`."""
    if not 0 <= layer < vit.positions.layers:
        existing = (
            f"{vit.positions.layers} position embeddings, counted from 0"
            if vit.positions.layers > 1
            else "one position embedding for all layers"
        )
        raise VitrailError(f"There is no position embedding for layer {layer}: {vit.config.name} has {existing}.")
    rows, columns = (vit.config if image_size is None else vit.config.replace(image_size=image_size)).grid
    vectors = vit.positions.of_patches(layer, *([(rows, columns)] if (rows, columns) != vit.config.grid else []))
    if vectors is None:
        kind = "no position embedding" if vit.config.position == "none" else "relative positions (a bias per offset)"
        raise VitrailError(f"{vit.config.name} has {kind}, so there are no position vectors to compare.")
    return torch.nn.functional.normalize(vectors.detach().to("cpu", torch.float64), dim=-1)
