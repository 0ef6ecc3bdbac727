"""Build models from names and configurations."""

from __future__ import annotations

from typing import Any

import torch

from vitrail.errors import VitrailError
from vitrail.models.bit import BiT
from vitrail.models.config import BiTConfig, ModelConfig, Pair, ViTConfig
from vitrail.models.initialisation import initialise
from vitrail.models.positions import SinCosPositions
from vitrail.models.variants import model_config
from vitrail.models.vit import ViT

Model = ViT | BiT


def create_model(
    name: str,
    *,
    outputs: int = 1000,
    image_size: int | Pair = 224,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    **changes: Any,
) -> Model:
    """Return a freshly initialised model by the paper's name: `ViT-B/16` (or `B/16`), `R50+ViT-B/16`, `BiT-R50x1`.

    `outputs=0` leaves the head out; `image_size` is a number or (height, width). Any field of `ViTConfig`, `BiTConfig` or
    `ResNetConfig` may be given by keyword. A few bring others with them unless those are given too: pooling "mean" or "map"
    goes without a class token, "relative" positions act in every layer, and only learned positions cover prefix tokens.
    On `device="meta"` nothing is allocated, so the largest models are there at once.
    """
    return build_model(model_config(name, outputs=outputs, image_size=image_size, **changes), device=device, dtype=dtype, seed=seed)


def build_model(
    config: ModelConfig,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> Model:
    """Return the model a configuration describes, initialised."""
    device = torch.device(device) if device is not None else torch.get_default_device()
    model = empty_model(config)
    if dtype is not None:
        model.to(dtype)
    if device.type != "meta":
        model.to_empty(device=device)
        initialise(model, seed)
    return model


def empty_model(config: ModelConfig) -> Model:
    """Return the model on the meta device: shapes without memory, ready to be given weights."""
    with torch.device("meta"):
        if isinstance(config, ViTConfig):
            return ViT(config)
        if isinstance(config, BiTConfig):
            return BiT(config)
    raise VitrailError(f"A model is built from a ViTConfig or a BiTConfig, not from {type(config).__name__}.")


def fill_fixed_tables(model: Model) -> None:
    """Compute what no checkpoint holds, after weights were put into an `empty_model`."""
    if isinstance(model, ViT) and isinstance(model.positions, SinCosPositions):
        if model.positions.table.is_meta:
            model.positions.table = torch.empty_like(model.positions.table, device=model.norm.weight.device)
        model.positions.fill()
