"""Polyak averaging: a running mean of the weights, kept in addition to the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """mean ← decay·mean + (1 − decay)·weights after every step, in float32, where the weights are."""

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        # Only trained parameters are averaged; fixed tables stay as they are.
        trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._weights: list[Tensor] = list(trainable.values())
        self._mean = {name: one.detach().clone().float() for name, one in trainable.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step, counted from 0, to the mean."""
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        torch._foreach_lerp_(list(self._mean.values()), self._weights, 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        return self._mean

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Put the averaged weights into the model while the block runs."""
        kept = [weight.detach().clone() for weight in self._weights]
        _copy(self._weights, list(self._mean.values()))
        try:
            yield
        finally:
            _copy(self._weights, kept)


def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):  # shards have no copy of a whole list
        target.copy_(value)
