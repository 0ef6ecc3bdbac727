"""What a model saw on its way to the logits, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError, counted
from vitrail.models.config import BiTConfig, Pair, ViTConfig, check_image_size


@dataclass(frozen=True)
class Features:
    """Named tensors of one forward pass; `B` images, `D` channels, a grid of `h` × `w` tokens."""

    tokens: Tensor  # [B, prefix + h·w, D] at the encoder's output, normalised if the model norms before pooling
    prefix: Tensor  # [B, prefix, D]: class token, distillation token, registers, in this order, as far as the model has them
    patches: Tensor  # [B, h, w, D]
    pooled: Tensor  # [B, D], after the final norm
    pre_logits: Tensor  # [B, D or the pre-logits width]: what the head sees
    layers: Mapping[int, Tensor] = field(default_factory=dict)  # tokens after the blocks in `layers`, not normalised

    @property
    def grid(self) -> Pair:
        return self.patches.shape[1], self.patches.shape[2]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def chosen_layers(layers: Iterable[int] | None, depth: int) -> tuple[int, ...]:
    """Return the given layers in ascending order, negative ones counted from the end; None is all of them."""
    if layers is None:
        return tuple(range(depth))
    numbers = list(layers)
    if not numbers:
        raise VitrailError(f"`layers` is empty. Leave it out for all {depth} layers, or pass some of 0 to {depth - 1}.")
    for layer in numbers:
        if not -depth <= layer < depth:
            raise VitrailError(f"There is no layer {layer}: the model has {depth}, numbered 0 to {depth - 1}.")
    return tuple(sorted({layer % depth for layer in numbers}))


def in_precision_of(images: Tensor, weight: Tensor) -> Tensor:
    """Return images in the precision of the first weight they meet; under autocast, which casts by itself, as they are."""
    device = images.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # the meta device has none
        return images.to(weight.dtype)
    if torch.float64 in (images.dtype, weight.dtype):  # which autocast leaves as it is
        return images.to(weight.dtype)
    autocast = torch.get_autocast_dtype(device)
    if device == "cpu" and weight.dtype not in (torch.float32, torch.float64, autocast):  # norms are not cast there
        raise VitrailError(
            f"The model's weights are {weight.dtype}, but autocast computes in {autocast}; on a CPU torch cannot mix the two. "
            f"Leave autocast off, set it to {weight.dtype}, or convert the model with model.float()."
        )
    return images


def grid_of(config: ViTConfig, images: Tensor) -> Pair:
    """Return the rows and columns of tokens that a batch of images has."""
    return images.shape[2] // config.stride[0], images.shape[3] // config.stride[1]


def stride_of(config: ViTConfig | BiTConfig) -> Pair:
    """Return the pixels of an image that a token or a position of the final map stands for, along each axis."""
    return config.stride if isinstance(config, ViTConfig) else (config.resnet.stride, config.resnet.stride)


def other_grid(config: ViTConfig, images: Tensor) -> tuple[Pair, ...]:
    """Return the grid of these images as one more argument for positions and attention; () where it is the model's own."""
    grid = grid_of(config, images)
    return () if grid == config.grid else (grid,)


def check_images(images: Tensor, config: ViTConfig | BiTConfig) -> None:
    """Say what is wrong with a batch before torch does."""
    name, channels = config.name, config.channels
    if images.ndim != 4:
        raise VitrailError(
            f"{name} takes a batch [images, channels, height, width]; this tensor is {list(images.shape)}. "
            f"{'Add the batch axis with images[None].' if images.ndim == 3 else 'Reshape it.'}"
        )
    if not images.is_floating_point():
        raise VitrailError(f"{name} takes floating-point images, normalised by its preprocessing; these are {images.dtype}.")
    if images.shape[1] != channels:
        last = images.shape[3] == channels
        cure = "Convert the images, or build the model with channels={}."
        raise VitrailError(
            f"{name} has {counted(channels, 'input channel')}, these images have {images.shape[1]}. "
            f"{'Channels come before rows: use images.permute(0, 3, 1, 2).' if last else cure.format(images.shape[1])}"
        )
    if isinstance(config, ViTConfig):
        _check_size(config, (images.shape[2], images.shape[3]))


def _check_size(config: ViTConfig, given: Pair) -> None:
    own = config.image_size
    if given == own:
        return
    if config.any_size:
        check_image_size(given, config.stride)
        return
    raise VitrailError(
        f"{config.name} expects {own[0]}×{own[1]} images, these are {given[0]}×{given[1]}. Resize the images, or the model with "
        f"model.resize(({given[0]}, {given[1]})), or load or create it with any_size=True."
    )
