"""Adapt a loaded model: new head, input channels, image size. Each change is noted in the report."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.class_names import set_classes
from vitrail.checkpoints.native import assign_weights
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError, counted
from vitrail.models import ViTConfig, empty_model
from vitrail.models.initialisation import lecun_normal_

Stem = Literal["sum", "repeat", "random"]


def change_outputs(bundle: Bundle, outputs: int) -> None:
    """Replace the head by a zero-initialised one, as for fine-tuning (§3.2)."""
    old = bundle.model.config.outputs
    bundle.model.replace_head(outputs)
    set_classes(bundle, None)
    new = f"zero-initialised head with {counted(outputs, 'output')}" if outputs else "no head"
    bundle.report.notes.append(f"{new}, was {counted(old, 'output') if old else 'no head'}")


def change_size(bundle: Bundle, size: int | tuple[int, int]) -> None:
    """Change the image size; position embeddings are resampled by the rule in the model's config."""
    before = bundle.model.config
    bundle.model.resize(size)
    config = bundle.model.config
    old, new = before.image_size, config.image_size
    if bundle.preprocess is not None:
        bundle.preprocess = bundle.preprocess.with_size(new)
    how = ""
    if isinstance(config, ViTConfig) and isinstance(before, ViTConfig) and new != old:
        grids = f"{before.grid[0]}×{before.grid[1]} → {config.grid[0]}×{config.grid[1]}"
        how = f", position embedding {grids} resampled with rule {config.position_resize!r}"
    bundle.report.notes.append(f"image size {old[0]}×{old[1]} → {new[0]}×{new[1]}{how}")


def change_channels(bundle: Bundle, channels: int, stem: Stem | None) -> None:
    """Change the number of input channels of the first layer; `stem` says how its weights are adapted."""
    config = bundle.model.config
    if channels == config.channels:
        return
    if stem is None:
        raise VitrailError(
            f"The model has {counted(config.channels, 'input channel')}. For channels={channels}, choose the rule: "
            f"stem='sum' (sum over the old channels, exact for grey images in a ViT), 'repeat' or 'random'."
        )
    if stem not in get_args(Stem):
        raise VitrailError(f"stem is {stem!r}; it must be one of {', '.join(get_args(Stem))}.")
    state = bundle.model.state_dict()
    first = next(name for name in ("resnet.root.weight", "root.weight", "patches.weight") if name in state)
    state[first] = _stem(state[first], channels, stem)
    mode = bundle.model.training
    bundle.model = assign_weights(empty_model(config.replace(channels=channels)), state)
    bundle.model.train(mode)
    if bundle.preprocess is not None:
        bundle.preprocess = _with_channels(bundle.preprocess, channels)
    bundle.report.notes.append(f"input channels {config.channels} → {channels}: {first} adapted with stem={stem!r}")
    if first != "patches.weight" and stem != "random":
        bundle.report.notes.append(
            "weight standardisation rescales each of these filters, so the outputs change: fine-tune before use"
        )


def _stem(weight: Tensor, channels: int, stem: Stem) -> Tensor:
    """Adapt a weight [filters, channels, height, width] to `channels`; `sum` and `repeat` keep the scale of the output."""
    old = weight.shape[1]
    if stem == "random":
        return lecun_normal_(weight.new_empty(weight.shape[0], channels, *weight.shape[2:]))
    if stem == "sum":
        return (weight.sum(dim=1, keepdim=True) / channels).repeat(1, channels, 1, 1)
    index = torch.arange(channels, device=weight.device) % old
    return weight[:, index] * (old / channels)


def _with_channels(preprocess: Preprocess, channels: int) -> Preprocess:
    """Use the mean over the RGB statistics for every new channel."""
    mean, std = (tuple([round(sum(values) / len(values), 6)] * channels) for values in (preprocess.mean, preprocess.std))
    return dataclasses.replace(preprocess, channels=channels, mean=mean, std=std)
