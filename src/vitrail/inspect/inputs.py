"""Check models before inspection, and feed images in batches that fit into memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import BiT, Model, ViT, ViTConfig
from vitrail.models.inference import InferenceModel

Array = npt.NDArray[Any]
Images = Tensor | Array | Iterable[Tensor]
"""Normalised images [image, channel, height, width], as one batch or an iterable of batches."""

_MEMORY = 2**30  # bytes of attention held at a time


class UntrainedWarning(UserWarning):
    """The weights are zero or as initialised, so the figure shows nothing learned."""


def checked_vit(model: nn.Module) -> ViT:
    """Return the model if it is a ViT; warn if it is untrained."""
    if isinstance(model, BiT):
        raise VitrailError(
            f"{model.config.name} is a ResNet: it has no attention and no position embeddings. "
            "To see its first-layer filters, use vitrail.inspect.filters."
        )
    if not isinstance(model, ViT):
        raise VitrailError(_not_ours(model))
    warn_untrained(model)
    return model


def checked_model(model: nn.Module) -> Model:
    """Return the model if it is a ViT, a hybrid or a BiT; warn if it is untrained."""
    if not isinstance(model, (ViT, BiT)):
        raise VitrailError(_not_ours(model))
    warn_untrained(model)
    return model


def _not_ours(model: object) -> str:
    if isinstance(model, InferenceModel):
        return "This copy was made for inference: its weights are packed and folded. Inspect the model it was made from."
    kind = f"{type(model).__module__.split('.')[0]}.{type(model).__name__}"
    return (
        f"This is a {kind}, not one of Vitrail's models. Build it with vitrail.create_model, or load its weights with "
        "vitrail.load(path).model, which also reads files of timm, Hugging Face, torchvision and Google."
    )


def warn_untrained(model: Model) -> None:
    message = untrained(model)
    if message is not None:
        warnings.warn(message, UntrainedWarning, stacklevel=4)


def untrained(model: Model) -> str | None:
    """Return a message if the weights are all zero or as initialised, else None.

    Training moves the biases of the norm layers away from exactly 0, so the weights alone are enough to tell.
    """
    norms = [module for module in model.modules() if isinstance(module, (nn.LayerNorm, nn.GroupNorm))]
    if any(module.bias.is_meta for module in norms):
        raise VitrailError(f"{model.config.name} is on the meta device, so it has no weights. Load a checkpoint first.")
    if any(bool(module.bias.detach().any()) for module in norms):
        return None
    zero = not any(bool(parameter.detach().any()) for parameter in model.parameters())
    state = "all zero" if zero else "untrained, as initialised"
    return f"The weights of this {model.config.name} are {state}: the figure is not meaningful. Train it, or load a checkpoint."


def in_batches(model: ViT, images: Images, batch: int | None = None) -> Iterator[Tensor]:
    """Yield batches on the model's device and in its dtype, of `batch` images or as many as fit into about 1 GiB."""
    if batch is not None and batch < 1:
        raise VitrailError(f"batch is {batch}; use 1 or more.")
    weight, count, sizes = model.norm.weight, 0, set[torch.Size]()
    for chunk in [images] if isinstance(images, (Tensor, np.ndarray)) else images:
        tensor = torch.as_tensor(chunk)
        if tensor.ndim != 4:  # raises the model's own error: splitting would use the wrong axis
            model.attention(tensor)
        sizes.add(tensor.shape[2:])
        if len(sizes) > 1:
            text = " and ".join(sorted(f"{height}×{width}" for height, width in sizes))
            raise VitrailError(f"Images of {text} cannot be in one figure; pass images of one size at a time.")
        size = batch or fitting_batch(config_at(model, tensor))
        for part in tensor.split(size) if len(tensor) else ():
            count += len(part)
            yield part.to(weight.device, weight.dtype if part.is_floating_point() else None)
    if not count:
        raise VitrailError("No images were given; pass at least one.")


def config_at(model: ViT, images: Tensor) -> ViTConfig:
    """Return the model's config with the size of these images, for a model that accepts any."""
    config, size = model.config, tuple(images.shape[2:])
    return config.replace(image_size=size) if config.any_size and size != config.image_size else config


def fitting_batch(config: ViTConfig) -> int:
    """Return how many images fit into memory: scores, softmax and a copy of one layer, and the head mean of all layers."""
    per_image = 4 * config.tokens**2 * (3 * config.heads + config.blocks)
    return max(1, _MEMORY // per_image)


def check_patch(config: ViTConfig, patch: tuple[int, int]) -> int:
    """Return the token index of the patch at (row, column). Negative numbers count from the end."""
    rows, columns = config.grid
    row, column = patch
    if not (-rows <= row < rows and -columns <= column < columns):
        raise VitrailError(
            f"There is no patch in row {row}, column {column}: the grid is {rows}×{columns}, counted from 0 at the top left."
        )
    return config.prefix + row % rows * columns + column % columns


def finite(values: Array, what: str) -> Array:
    """Return the values if all are finite."""
    if not np.isfinite(values).all():
        raise VitrailError(
            f"NaN or infinity in {what}. Either the images or the weights contain them, or the dtype overflowed: "
            "check the images and the weights, or use model.float()."
        )
    return values
