"""Attention's forward pass over few tokens: a program takes some of a head's queries and all of its keys at once.

So softmax needs no second thoughts. The keys are covered by up to three pieces, powers of two as the compiler wants them: 197 by
128 + 64 + 16 and not by 256. With few heads in all, as of a single image, every tile of queries is a program of its own; with
many, one program takes all tiles and reads the keys once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launching import ceil_div, is_fake, next_power_of_2, processors

_LEAST = 16  # rows or columns that the tensor cores take


@triton.jit
def _piece(k_in, v_in, at, start, keys, row: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    key = start + tl.arange(0, SIZE)
    place, known = at + key[:, None] * row + tl.arange(0, WIDTH)[None, :], (key < keys)[:, None]
    return tl.load(k_in + place, mask=known, other=0.0), tl.load(v_in + place, mask=known, other=0.0)


@triton.jit
def _scores(q, k, start, keys, SIZE: tl.constexpr):
    known = start + tl.arange(0, SIZE) < keys
    return tl.where(known[None, :], tl.dot(q, tl.trans(k)), float("-inf"))


@triton.jit
def _attention_forward_kernel(
    q_in, k_in, v_in, out, lse, scale,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, kv_row: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, TILES: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, THREE: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = (queries + QUERIES * TILES - 1) // (QUERIES * TILES)  # a head
    image, head = (tl.program_id(0) // PROGRAMS // HEADS).to(tl.int64), tl.program_id(0) // PROGRAMS % HEADS
    start = tl.program_id(0) % PROGRAMS * QUERIES * TILES
    at, channel, o_row = image * keys * kv_row + head * WIDTH, tl.arange(0, WIDTH), HEADS * WIDTH
    k1, v1 = _piece(k_in, v_in, at, 0, keys, kv_row, WIDTH, ONE)
    if TWO > 0:
        k2, v2 = _piece(k_in, v_in, at, ONE, keys, kv_row, WIDTH, TWO)
    if THREE > 0:
        k3, v3 = _piece(k_in, v_in, at, ONE + TWO, keys, kv_row, WIDTH, THREE)
    per_log2 = scale * 1.4426950408889634
    for first in range(start, min(queries, start + QUERIES * TILES), QUERIES):
        query = first + tl.arange(0, QUERIES)
        real = (query < queries)[:, None]
        place = image * queries * q_row + head * WIDTH + query[:, None] * q_row + channel[None, :]
        q = tl.load(q_in + place, mask=real, other=0.0)
        s1 = _scores(q, k1, 0, keys, ONE)
        top = tl.max(s1, axis=1)
        if TWO > 0:
            s2 = _scores(q, k2, ONE, keys, TWO)
            top = tl.maximum(top, tl.max(s2, axis=1))
        if THREE > 0:
            s3 = _scores(q, k3, ONE + TWO, keys, THREE)
            top = tl.maximum(top, tl.max(s3, axis=1))
        top *= per_log2
        p = tl.exp2(s1 * per_log2 - top[:, None])
        total = tl.sum(p, axis=1)
        value = tl.dot(p.to(q.dtype), v1)
        if TWO > 0:
            p = tl.exp2(s2 * per_log2 - top[:, None])
            total += tl.sum(p, axis=1)
            value = tl.dot(p.to(q.dtype), v2, value)
        if THREE > 0:
            p = tl.exp2(s3 * per_log2 - top[:, None])
            total += tl.sum(p, axis=1)
            value = tl.dot(p.to(q.dtype), v3, value)
        place = image * queries * o_row + head * WIDTH + query[:, None] * o_row + channel[None, :]
        tl.store(out + place, (value / total[:, None]).to(q.dtype), mask=real)
        level = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + (image * HEADS + head) * queries + query, level, mask=query < queries)


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, *, together: bool | None = None) -> tuple[Tensor, Tensor]:
    """Attention's output [image, query, width], and the logarithms of softmax's denominators [image, head, query].

    q, k and v are [image, token, width], and may be parts of one tensor. `together` says whether one program takes all tiles of
    a head; None: where that is faster.
    """
    images, queries, width = q.shape
    out = torch.empty(images, queries, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(images, heads, queries, dtype=torch.float32, device=q.device)
    tile = min(64, max(_LEAST, next_power_of_2(queries)))
    if together is None:
        together = images * heads > 8 * processors(q.device)
    tiles = ceil_div(queries, tile) if together else 1
    one, two, three = cover(k.shape[1])
    if not is_fake(q):
        _attention_forward_kernel[(images * heads * ceil_div(queries, tile * tiles),)](
            q, k, v, out, lse, (width // heads) ** -0.5,
            queries=queries, keys=k.shape[1], q_row=q.stride(1), kv_row=k.stride(1), HEADS=heads, WIDTH=width // heads,
            QUERIES=tile, TILES=tiles, ONE=one, TWO=two, THREE=three, num_warps=4, num_stages=3 if tiles > 1 else 1,
        )  # fmt: skip
    return out, lse


def cover(count: int) -> tuple[int, int, int]:
    """Up to three powers of two, from 16, that together are at least `count`, and little more; 0 for none."""
    rounded = ceil_div(count, _LEAST) * _LEAST
    parts = [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]
    if len(parts) > 3:
        parts = [next_power_of_2(rounded)]
    one, two, three = [*parts, 0, 0][:3]
    return one, two, three
