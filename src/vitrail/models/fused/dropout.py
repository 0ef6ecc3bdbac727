"""Dropout inside other kernels: whether a value is kept is computed from where it is, forward and backward alike.

Nothing is stored. Masks come from a hash of (seed, place), a counter mixed as in MurmurHash3: far cheaper than the generators torch
uses, and as even as dropout needs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(seed, place, rate):
    """1 / (1 − rate) where a value is kept, 0 where it is dropped. `seed` points to a whole number."""
    number = tl.load(seed)
    low, high = (number & 0xFFFFFFFF).to(tl.uint32), (number >> 32).to(tl.uint32)
    mixed = _mix(place.to(tl.uint32) ^ low) ^ high ^ (place >> 32).to(tl.uint32)
    share = _mix(mixed).to(tl.float32) * 2.3283064365386963e-10  # from 0 to 1
    return tl.where(share >= rate, 1.0 / (1.0 - rate), 0.0)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
