"""Activation checkpointing: compute activations again in the backward pass instead of keeping them, memory for time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vitrail.errors import VitrailError

Keep = Literal["nothing", "matmuls"]

_MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default]


@dataclass(frozen=True)
class Recompute:
    """How many blocks, from the first, recompute their activations, and what they keep besides their input.

    With `matmuls` the outputs of matmuls and convolutions stay, which cost the most to compute again; norms, attention
    and activation functions are recomputed.
    """

    blocks: int = 0
    keep: Keep = "nothing"

    def __post_init__(self) -> None:
        if self.keep not in ("nothing", "matmuls"):
            raise VitrailError(f"keep is {self.keep!r}; recomputed blocks can keep nothing or matmuls.")

    def applies_to(self, number: int) -> bool:
        return number < self.blocks and torch.is_grad_enabled()

    def run(self, number: int, block: Callable[..., Any], *arguments: Any, draws: bool = True) -> Any:
        """Run block `number`. `draws`: whether it draws random numbers, which must then come out the same again."""
        if not self.applies_to(number):
            return block(*arguments)
        chosen: dict[str, Any] = {}
        if self.keep == "matmuls":
            chosen["context_fn"] = partial(create_selective_checkpoint_contexts, _MATMULS)
        return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=draws, **chosen)
