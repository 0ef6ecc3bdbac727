"""Changes to a finished model: another image size, another head, activation checkpointing."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from vitrail.errors import VitrailError
from vitrail.models.attention import AxialAttention
from vitrail.models.config import BiTConfig, Pair, PositionRule, ViTConfig
from vitrail.models.layers import Float32Linear
from vitrail.models.recompute import Keep, Recompute

if TYPE_CHECKING:
    from vitrail.models.bit import BiT
    from vitrail.models.vit import ViT

log = logging.getLogger("vitrail")
T = TypeVar("T", bound="ViT | BiT")


def resize(model: ViT, size: int | Pair, rule: PositionRule | None = None) -> ViT:
    """Let a model take images of another size (height, width); positions are resampled by the rule, or the model's own."""
    old, rule = model.config.grid, rule or model.config.position_resize
    model.config = model.config.replace(image_size=size, position_resize=rule)
    grid, model.positions.rule = model.config.grid, rule
    if grid != old:
        model.positions.resize(grid, rule)
        log.info("positions %d×%d → %d×%d (%s, rule %r)", *old, *grid, model.config.position, rule)
    for block in model.blocks:
        if isinstance(attention := getattr(block, "attention", None), AxialAttention):
            attention.grid = grid
    return model


def accepting_any_size(model: T) -> T:
    """Return a model that shares every weight with this one and accepts images of any size; the model itself stays as it is."""
    if not isinstance(model.config, ViTConfig) or model.config.any_size:  # a ResNet does anyway
        return model
    shared = copy.copy(model)  # with the same dictionaries: a new head would be that of both
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(shared, name, dict(getattr(model, name)))
    shared.config = model.config.replace(any_size=True)
    return shared


def new_head(config: ViTConfig | BiTConfig) -> nn.Module:
    """Return the last layer, or nothing where a model has no outputs."""
    inputs = config.resnet.out_channels if isinstance(config, BiTConfig) else config.pre_logits or config.width
    return Float32Linear(inputs, config.outputs) if config.outputs else nn.Identity()


def replace_head(model: T, outputs: int) -> T:
    """Put on a new zero-initialised head, as fine-tuning does (§3.2); the old one is discarded, pre-logits are kept."""
    like = next(model.parameters())
    model.config = model.config.replace(outputs=outputs)
    for name in ("head", "distill_head"):
        if getattr(model, name, None) is not None:
            head = new_head(model.config).to(like)
            for parameter in head.parameters():
                nn.init.zeros_(parameter)
            setattr(model, name, head)
    return model


def checkpoint_activations(model: ViT | BiT, total: int, blocks: int | None, keep: Keep) -> int:
    """Recompute the first `blocks` of `total` blocks (None: all) in the backward pass to save memory.

    They keep nothing but their input or, with "matmuls", also what is expensive to compute again.
    """
    if blocks is not None and blocks < 0:
        raise VitrailError(f"checkpoint_activations({blocks}): give a number of blocks from 0, or None for all {total}.")
    model.recompute = Recompute(total if blocks is None else min(blocks, total), keep)
    log.info("activation checkpointing: %d/%d blocks", model.recompute.blocks, total)
    return model.recompute.blocks
