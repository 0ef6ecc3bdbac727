"""Find the largest batch that fits in memory: double until it does not fit, then bisect."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

LIMIT = 32_768


def largest_batch(fits: Callable[[int], bool], *, first: int = 64, limit: int = LIMIT) -> int:
    """Return the largest batch for which `fits` is true, to within 1/32 of it; 0 if not even one image fits.

    `fits` is called as rarely as possible: each call costs a step, and with a compiled model a compilation.
    """
    low, high = 0, min(first, limit)
    while fits(high):
        if high == limit:
            return limit
        low, high = high, min(2 * high, limit)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, in any wording of torch or cuBLAS."""
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in message or "alloc_failed" in message


def free_memory(device: torch.device, *, compiled: bool = True) -> None:
    """Release cached memory; with `compiled`, also compiled graphs."""
    if compiled:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
