"""Dropout inside other kernels: the mask is a hash of (seed, offset), so that forward and backward compute the same and store none.

The hash mixes a counter as MurmurHash3 does: far cheaper than torch's Philox, and uniform enough for dropout.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dropout_scale(seed, offset, rate):
    """Return 1 / (1 − rate) for values that are kept and 0 for those dropped. `seed` points to an int64."""
    number = tl.load(seed)
    low, high = (number & 0xFFFFFFFF).to(tl.uint32), (number >> 32).to(tl.uint32)
    mixed = _mix(offset.to(tl.uint32) ^ low) ^ high ^ (offset >> 32).to(tl.uint32)
    uniform = _mix(mixed).to(tl.float32) * 2.3283064365386963e-10  # in [0, 1]
    return tl.where(uniform >= rate, 1.0 / (1.0 - rate), 0.0)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
