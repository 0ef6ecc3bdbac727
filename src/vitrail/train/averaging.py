"""Polyak averaging: a running mean of the weights, kept in addition to the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.train.shards import local, sharded_like


class Average:
    """mean ← decay·mean + (1 − decay)·weights after every step, in float32, where the weights are.

    A step that is skipped because its gradient is not finite counts too: the weights did not change, and the mean approaches them.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        # Only trained parameters are averaged; fixed tables stay as they are.
        trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._weights: dict[str, Tensor] = dict(trainable)
        # Of shards, this rank's: operations on DTensors cost the host much time.
        self._mean = {name: local(one).detach().clone().float() for name, one in trainable.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step, counted from 0, to the mean."""
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        torch._foreach_lerp_(list(self._mean.values()), self._local_weights(), 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        """The mean by parameter name, to be saved or written into; sharded like the parameters."""
        return {name: sharded_like(self._weights[name], mean) for name, mean in self._mean.items()}

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Put the averaged weights into the model while the block runs."""
        weights = self._local_weights()
        kept = [weight.detach().clone() for weight in weights]
        torch._foreach_copy_(weights, list(self._mean.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(self._local_weights(), kept)

    def _local_weights(self) -> list[Tensor]:
        return [local(one) for one in self._weights.values()]
