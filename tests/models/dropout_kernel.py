"""A kernel that writes dropout's factors for any range of offsets, also those of tensors too large for a test."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.dropout import dropout_scale


@triton.jit
def _factors_kernel(seed, start, out, rate, SIZE: tl.constexpr):
    column = tl.arange(0, SIZE)
    tl.store(out + column, dropout_scale(seed, tl.load(start) + column, rate))


def factors(seed: int, start: int, rate: float, device: str, size: int = 4096) -> Tensor:
    """Return the factors of `size` values from offset `start`."""
    out = torch.empty(size, device=device)
    _factors_kernel[(1,)](torch.tensor(seed, device=device), torch.tensor(start, device=device), out, rate, SIZE=size)
    return out
