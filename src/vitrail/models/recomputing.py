"""Activations that are computed again in the backward pass instead of being kept: memory for time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vitrail.errors import VitrailError

Keeps = Literal["nothing", "products"]

_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default]


@dataclass(frozen=True)
class Recomputing:
    """Which of a row of blocks keep little, and what they keep besides their input.

    With `products` the outputs of matrix products and convolutions stay, which cost the most to get again; norms, attention and
    activations are recomputed.
    """

    blocks: int = 0
    keeps: Keeps = "nothing"

    def __post_init__(self) -> None:
        if self.keeps not in ("nothing", "products"):
            raise VitrailError(f"What recomputed blocks keep is {self.keeps!r}; it can be nothing or products.")

    def run(self, number: int, block: Callable[..., Any], *arguments: Any, draws: bool = True) -> Any:
        """Block `number`. `draws` says whether it draws random numbers, which then must come out the same again."""
        if number >= self.blocks or not torch.is_grad_enabled():
            return block(*arguments)
        chosen: dict[str, Any] = {}
        if self.keeps == "products":
            chosen["context_fn"] = partial(create_selective_checkpoint_contexts, _PRODUCTS)
        return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=draws, **chosen)
