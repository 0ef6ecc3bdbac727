"""What may be looked at: the right kind of model, weights that mean something, and images in pieces that fit the memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import BiT, Model, ViT

Array = npt.NDArray[Any]
Images = Tensor | Array | Iterable[Tensor]
"""Normalised images [image, channel, height, width], whole or as any number of such batches one after another."""

_MEMORY = 2**30  # bytes of attention to hold at a time


class UntrainedWarning(UserWarning):
    """The figure shows initial or zero weights, not anything learnt."""


def checked_vit(model: nn.Module) -> ViT:
    """The model itself if it is a ViT; a warning if it has learnt nothing."""
    if isinstance(model, BiT):
        raise VitrailError(
            f"{model.config.name} is a ResNet: it has neither attention nor position embeddings, so there is nothing of that kind "
            "to show. Its first-layer filters can be seen with vitrail.inspect.filters."
        )
    if not isinstance(model, ViT):
        raise VitrailError(_not_ours(model))
    warn_untrained(model)
    return model


def checked_model(model: nn.Module) -> Model:
    """The model itself if it is a ViT, a hybrid or a BiT; a warning if it has learnt nothing."""
    if not isinstance(model, (ViT, BiT)):
        raise VitrailError(_not_ours(model))
    warn_untrained(model)
    return model


def _not_ours(model: object) -> str:
    kind = f"{type(model).__module__.split('.')[0]}.{type(model).__name__}"
    return (
        f"This is a {kind}, not one of Vitrail's models. Build it with vitrail.create_model, or bring its weights in with "
        "vitrail.load(path).model, which also reads timm's, Hugging Face's, torchvision's and Google's files."
    )


def warn_untrained(model: Model) -> None:
    sentence = untrained(model)
    if sentence is not None:
        warnings.warn(sentence, UntrainedWarning, stacklevel=4)


def untrained(model: Model) -> str | None:
    """A sentence if the weights are all zero or as they were initialised, else None.

    Any training moves the biases of the normalisation layers away from exactly 0, so they tell without another file.
    """
    norms = [module for module in model.modules() if isinstance(module, (nn.LayerNorm, nn.GroupNorm))]
    if any(module.bias.is_meta for module in norms):
        raise VitrailError(f"{model.config.name} is on the meta device: it has shapes but no weights to look at. Load some first.")
    if any(bool(module.bias.detach().any()) for module in norms):
        return None
    zero = not any(bool(parameter.detach().any()) for parameter in model.parameters())
    state = "all zero" if zero else "untrained, as they were initialised"
    return f"The weights of this {model.config.name} are {state}: the figure means nothing yet. Train it, or load a checkpoint."


def in_batches(model: ViT, images: Images, batch: int | None = None) -> Iterator[Tensor]:
    """The images on the model's device and in its precision, as many at a time as `batch` says or the memory bound allows."""
    if batch is not None and batch < 1:
        raise VitrailError(f"batch is {batch}; at least one image must be looked at at a time.")
    weight, size = model.norm.weight, batch or fitting_batch(model)
    seen = 0
    for piece in [images] if isinstance(images, (Tensor, np.ndarray)) else images:
        tensor = torch.as_tensor(piece)
        if tensor.ndim != 4:  # refuse it now: splitting would take another axis for the images
            model.attention(tensor)
        for part in tensor.split(size) if len(tensor) else ():
            seen += len(part)
            yield part.to(weight.device, weight.dtype if part.is_floating_point() else None)
    if not seen:
        raise VitrailError("0 images given: there is nothing to look at. Give at least one.")


def fitting_batch(model: ViT) -> int:
    """Images whose attention fits the bound: of one layer scores, softmax and a copy; of all layers the mean over heads."""
    config = model.config
    per_image = 4 * config.tokens**2 * (3 * config.heads + config.blocks)
    return max(1, _MEMORY // per_image)


def check_patch(model: ViT, patch: tuple[int, int]) -> int:
    """The token's number of the patch at (row, column); negative ones count from the end."""
    rows, columns = model.config.grid
    row, column = patch
    if not (-rows <= row < rows and -columns <= column < columns):
        raise VitrailError(
            f"There is no patch in row {row}, column {column}: the grid is {rows}×{columns}, counted from 0 at the top left."
        )
    return model.config.prefix + row % rows * columns + column % columns


def finite(values: Array, what: str) -> Array:
    """The values, unless overflow or broken weights have made them useless."""
    if not np.isfinite(values).all():
        raise VitrailError(
            f"{what} came out as NaN or infinite. The images or the weights hold such numbers, or the precision overflowed: "
            "check the images, or try again with model.float()."
        )
    return values
