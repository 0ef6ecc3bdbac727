"""What the weights alone show: filters of the first layer and likeness of positions (Fig. 7 left and centre)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array, checked_model, checked_vit, finite
from vitrail.models import Model, ViT


class Filters(NamedTuple):
    """The first linear map of the pixels."""

    components: Array
    """[component, channel, height, width]: principal components of the filters, unit length, strongest first."""
    explained: Array
    """[component]: the share of the filters' variance each accounts for."""
    raw: Array
    """[filter, channel, height, width]: the filters themselves."""


def filters(model: nn.Module, components: int = 28) -> Filters:
    """Principal components of the filters that see the pixels, 28 as in the paper's Fig. 7, and the filters themselves.

    For a ViT these are the rows of the patch embedding. A hybrid's patches come from a feature map, so for hybrids and BiT it
    is the ResNet's first convolution, standardised as it is applied. The filters' mean is taken off first. A component's sign
    is free; here its largest entry is positive. There are at most as many components as filters or as entries of a filter.
    """
    if components < 1:
        raise VitrailError(f"components is {components}; at least one principal component must be asked for.")
    raw = first_filters(checked_model(model))
    flat = raw.flatten(1)
    centred = flat - flat.mean(dim=0)
    _, strengths, directions = torch.linalg.svd(centred, full_matrices=False)
    largest = directions.abs().argmax(dim=1, keepdim=True)
    directions = directions * directions.gather(1, largest).sign()
    variance = strengths**2
    explained = variance / variance.sum().clamp(min=torch.finfo(variance.dtype).tiny)
    kept = min(components, len(directions))
    finite(raw.numpy(), "The filters")
    return Filters(
        directions[:kept].unflatten(1, raw.shape[1:]).float().numpy(),
        explained[:kept].float().numpy(),
        raw.float().numpy(),
    )


def first_filters(model: Model) -> Tensor:
    """[filter, channel, height, width] in float64 on the CPU, where a decomposition is exact and the same everywhere."""
    if isinstance(model, ViT):
        weight = model.patches.weight if model.resnet is None else model.resnet.root.standardised()
    else:
        weight = model.root.standardised()
    return weight.detach().to("cpu", torch.float64)


def position_similarity(model: nn.Module, layer: int = 0) -> Array:
    """Cosine similarity of each patch's position embedding to every other's: [row, column, row, column], −1 to 1.

    The first two axes say whose similarities, the last two to which patch. Prefix tokens are left out. Models that add
    positions of their own before every layer take `layer`.
    """
    vit = checked_vit(model)
    if not 0 <= layer < vit.positions.layers:
        found = (
            f"{vit.positions.layers} tables of positions" if vit.positions.layers > 1 else "one table of positions for all layers"
        )
        raise VitrailError(f"There is no table of positions for layer {layer}: {vit.config.name} has {found}, counted from 0.")
    vectors = vit.positions.of_patches(layer)
    if vectors is None:
        kind = "no positions" if vit.config.position == "none" else "relative positions: a bias for each offset, no vector a patch"
        raise VitrailError(f"{vit.config.name} has {kind}, so there is nothing whose similarity could be shown.")
    rows, columns = vit.config.grid
    unit = torch.nn.functional.normalize(vectors.detach().to("cpu", torch.float64).flatten(0, 1), dim=1)
    similarity = (unit @ unit.T).reshape(rows, columns, rows, columns).float().numpy()
    return finite(similarity, "The position similarity")
