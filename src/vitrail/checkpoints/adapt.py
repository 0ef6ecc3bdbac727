"""Changes to a loaded model: another head, other input channels, another image size. Each says what it did."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.native import fill
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.models import empty_model
from vitrail.models.initialise import lecun_normal_

Stem = Literal["sum", "repeat", "random"]


def change_outputs(bundle: Bundle, outputs: int) -> None:
    """A new head of zeros, as fine-tuning begins with (§3.2)."""
    old = bundle.model.config.outputs
    bundle.model.replace_head(outputs)
    bundle.classes = None
    what = f"a new head of zeros for {outputs} outputs" if outputs else "no head"
    bundle.report.notes.append(f"{what} in place of {f'the one with {old}' if old else 'none'}")


def change_size(bundle: Bundle, size: int | tuple[int, int]) -> None:
    old = bundle.model.config.image_size
    bundle.model.resize(size)
    new = bundle.model.config.image_size
    if bundle.preprocess is not None:
        bundle.preprocess = bundle.preprocess.with_size(new)
    rule = getattr(bundle.model.config, "position_resize", None)
    how = f", positions resampled by the rule {rule!r}" if rule else ""
    bundle.report.notes.append(f"image size {old[0]}×{old[1]} → {new[0]}×{new[1]}{how}")


def change_channels(bundle: Bundle, channels: int, stem: Stem | None) -> None:
    """Give the first layer another number of input channels, by a rule that must be named."""
    config = bundle.model.config
    if channels == config.channels:
        return
    if stem is None:
        raise VitrailError(
            f"The model takes {config.channels} channels, and channels={channels} was asked for. Say what its first layer becomes: "
            f"stem='sum' (equal shares of the old sum; a ViT then takes grey images exactly), 'repeat' or 'random'."
        )
    if stem not in get_args(Stem):
        raise VitrailError(f"stem is {stem!r}; it can be {', '.join(get_args(Stem))}.")
    state = bundle.model.state_dict()
    first = next(name for name in ("resnet.root.weight", "root.weight", "patches.weight") if name in state)
    state[first] = _stem(state[first], channels, stem)
    mode = bundle.model.training
    bundle.model = fill(empty_model(config.replace(channels=channels)), state)
    bundle.model.train(mode)
    if bundle.preprocess is not None:
        bundle.preprocess = _with_channels(bundle.preprocess, channels)
    bundle.report.notes.append(f"input channels {config.channels} → {channels}: {first} by the rule {stem!r}")
    if first != "patches.weight" and stem != "random":
        bundle.report.notes.append("its standardisation rescales these filters one by one: a start for fine-tuning, no more")


def _stem(weight: Tensor, channels: int, stem: Stem) -> Tensor:
    """A first layer [filters, channels, height, width] for other channels; `sum` and `repeat` keep the response's scale."""
    old = weight.shape[1]
    if stem == "random":
        new = weight.new_empty(weight.shape[0], channels, *weight.shape[2:])
        return nn.Parameter(lecun_normal_(new), requires_grad=False).data
    if stem == "sum":
        return (weight.sum(dim=1, keepdim=True) / channels).repeat(1, channels, 1, 1)
    index = torch.arange(channels, device=weight.device) % old
    return weight[:, index] * (old / channels)


def _with_channels(preprocess: Preprocess, channels: int) -> Preprocess:
    """Statistics of red, green and blue say nothing of other channels: each gets their mean."""
    mean, std = (tuple([round(sum(values) / len(values), 6)] * channels) for values in (preprocess.mean, preprocess.std))
    return dataclasses.replace(preprocess, channels=channels, mean=mean, std=std)
