"""Features after every layer: predictions read out of them, their similarity, and their principal components as colours."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array, Images, checked_vit, finite, in_batches
from vitrail.models.attention_maps import normed_tokens
from vitrail.models.features import evaluating

COLOUR_PERCENTILES = (2.0, 98.0)


@torch.no_grad()
def layer_features(model: nn.Module, images: Images, *, batch: int | None = None) -> Array:
    """Compute the tokens after each layer as pooling would see them: [image, layer, token, width].

    These are the tokens after a block with the model's final norm applied, if the model norms before pooling; so those of the
    last layer are `model.features(images).tokens`. Prefix tokens come first.
    """
    vit = checked_vit(model)
    parts = []
    for part in in_batches(vit, images, batch):
        with evaluating(vit):
            kept = vit.features(part, range(len(vit.blocks))).layers
            parts.append(torch.stack([normed_tokens(vit, kept[number]).float() for number in sorted(kept)], dim=1).cpu().numpy())
    return finite(np.concatenate(parts), "the features")


@torch.no_grad()
def layer_outputs(model: nn.Module, features: Array) -> Array:
    """Read out the model's outputs after each layer, from `layer_features`: [image, layer, output]. **Not in the paper.**

    Pooling and head are those after the last layer (a "logit lens"); no other layer was trained to be read out this way. The
    outputs of the last layer are the model's own.
    """
    vit = checked_vit(model)
    if not vit.config.outputs:
        raise VitrailError(f"{vit.config.name} has no head, so no outputs can be read out. Load a checkpoint with a head.")
    weight = vit.norm.weight
    with evaluating(vit):
        tokens = torch.from_numpy(features).to(weight.device, weight.dtype)
        outputs = torch.stack([vit.logits(tokens[:, number]) for number in range(tokens.shape[1])], dim=1)
    return finite(outputs.float().cpu().numpy(), "the outputs")


def feature_similarity(features: Array, query: int | None = None) -> Array:
    """Compute the cosine similarity between all tokens of one layer, [token, width] → [token, token], −1 to 1.

    With `query`, only that of one token to all: [token].
    """
    unit = nn.functional.normalize(torch.from_numpy(features).float(), dim=1)
    similarity: Array = (unit @ (unit.T if query is None else unit[query])).clamp(-1, 1).numpy()
    return similarity


def feature_colours(features: Array) -> Array:
    """Turn the first three principal components of patch features [patch, width] into red, green and blue from 0 to 1.

    Features are centred over the patches. Each component is scaled by itself: its 2nd percentile is 0, its 98th is 1. Its sign is
    arbitrary; here the largest entry of its direction is positive. So colours of two images, or layers, cannot be compared.
    """
    centred = torch.from_numpy(features).double()
    centred = centred - centred.mean(dim=0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    largest = directions.abs().argmax(dim=1, keepdim=True)
    components = centred @ (directions * directions.gather(1, largest).sign())[:3].T
    components = nn.functional.pad(components, (0, 3 - components.shape[1]))  # of fewer than three patches
    colours: Array = _between_percentiles(components).numpy()
    return colours


def _between_percentiles(values: Tensor) -> Tensor:
    low, high = torch.quantile(values, torch.tensor(COLOUR_PERCENTILES, dtype=values.dtype) / 100, dim=0)
    scaled: Tensor = (values - low) / (high - low).clamp(min=1e-12)
    return scaled.clamp(0, 1)
