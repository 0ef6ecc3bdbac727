"""The largest batch that fits: doubled until it does not, then narrowed down."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

MOST = 32_768


def largest_batch(fits: Callable[[int], bool], *, first: int = 64, most: int = MOST) -> int:
    """The largest batch for which `fits` says yes, to within a thirty-second part of it; 0 if not even one image does.

    `fits` is asked as rarely as can be: every answer costs a step, and a compiled model a compilation.
    """
    low, high = 0, min(first, most)
    while fits(high):
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def out_of_memory(error: BaseException) -> bool:
    """Whether this error means that memory did not suffice, in any of the ways the libraries put it."""
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in words or "alloc_failed" in words


def free_memory(device: torch.device, *, compiled: bool = True) -> None:
    """Give back what nobody holds any more; with `compiled`, also what compilation has kept."""
    if compiled:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
