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

from vitrail.models.fused.launch import ceil_div, is_fake, next_power_of_2, num_sms

_LEAST = 16  # rows or columns that the tensor cores take


@triton.jit
def _piece(k_in, v_in, at, start, keys, row: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    key = start + tl.arange(0, SIZE)
    place, known = at + key[:, None] * row + tl.arange(0, WIDTH)[None, :], (key < keys)[:, None]
    return tl.load(k_in + place, mask=known, other=0.0), tl.load(v_in + place, mask=known, other=0.0)


@triton.jit
def _scores(q, k, start: tl.constexpr, keys: tl.constexpr, SIZE: tl.constexpr, TURNED: tl.constexpr):
    scores = tl.dot(k, q) if TURNED else tl.dot(q, tl.trans(k))
    if start + SIZE > keys:
        known = start + tl.arange(0, SIZE) < keys
        scores = tl.where(tl.expand_dims(known, 1 if TURNED else 0), scores, float("-inf"))
    return scores


@triton.jit
def _weigh(scores, v, top, per_log2, total, value, TURNED: tl.constexpr):
    """Add what some keys contribute to the sum of weights and to the values weighed by them."""
    AXIS: tl.constexpr = 0 if TURNED else 1
    p = tl.exp2(scores * per_log2 - tl.expand_dims(top, AXIS))
    low = p.to(v.dtype)
    return total + tl.sum(p, axis=AXIS), tl.dot(tl.trans(v), low, value) if TURNED else tl.dot(low, v, value)


@triton.jit
def _tile(
    q_in, out, lse, at_q, at_out, at_lse, first, per_log2, k1, v1, k2, v2, k3, v3,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, o_row: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    ONE: tl.constexpr, TWO: tl.constexpr, THREE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Some queries from `first`, with the three pieces of keys and values.

    Turned round, queries are columns: tensor cores take 64 rows, but as few as 8 columns.
    """
    AXIS: tl.constexpr = 0 if TURNED else 1  # the keys'
    query, channel = first + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    q = tl.load(q_in + at_q + query[:, None] * q_row + channel[None, :], mask=(query < queries)[:, None], other=0.0)
    if TURNED:
        q = tl.trans(q)
    s1 = _scores(q, k1, 0, keys, ONE, TURNED)
    top = tl.max(s1, axis=AXIS)
    if TWO > 0:
        s2 = _scores(q, k2, ONE, keys, TWO, TURNED)
        top = tl.maximum(top, tl.max(s2, axis=AXIS))
    if THREE > 0:
        s3 = _scores(q, k3, ONE + TWO, keys, THREE, TURNED)
        top = tl.maximum(top, tl.max(s3, axis=AXIS))
    top *= per_log2
    total = tl.zeros([QUERIES], tl.float32)
    value = tl.zeros([WIDTH, QUERIES] if TURNED else [QUERIES, WIDTH], tl.float32)
    total, value = _weigh(s1, v1, top, per_log2, total, value, TURNED)
    if TWO > 0:
        total, value = _weigh(s2, v2, top, per_log2, total, value, TURNED)
    if THREE > 0:
        total, value = _weigh(s3, v3, top, per_log2, total, value, TURNED)
    place = at_out + tl.expand_dims(query, AXIS) * o_row + tl.expand_dims(channel, 1 - AXIS)
    value *= tl.expand_dims(1.0 / total, AXIS)
    tl.store(out + place, value.to(q.dtype), mask=tl.expand_dims(query < queries, AXIS))
    tl.store(lse + at_lse + query, (top + tl.log2(total)) * 0.6931471805599453, mask=query < queries)


@triton.jit
def _attention_forward_kernel(
    q_in, k_in, v_in, out, lse, scale,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, kv_row: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, TILES: tl.constexpr, REST: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, THREE: tl.constexpr,
):  # fmt: skip
    END: tl.constexpr = queries // QUERIES * QUERIES if REST > 0 else queries
    PROGRAMS: tl.constexpr = (END + QUERIES * TILES - 1) // (QUERIES * TILES)  # a head
    o_row: tl.constexpr = HEADS * WIDTH
    image, head = (tl.program_id(0) // PROGRAMS // HEADS).to(tl.int64), tl.program_id(0) // PROGRAMS % HEADS
    start = tl.program_id(0) % PROGRAMS * QUERIES * TILES
    at = image * keys * kv_row + head * WIDTH
    at_q, at_out, at_lse = image * queries * q_row + head * WIDTH, image * queries * o_row + head * WIDTH, image * HEADS + head
    at_lse *= queries
    k1, v1 = _piece(k_in, v_in, at, 0, keys, kv_row, WIDTH, ONE)
    k2, v2, k3, v3 = k1, v1, k1, v1
    if TWO > 0:
        k2, v2 = _piece(k_in, v_in, at, ONE, keys, kv_row, WIDTH, TWO)
    if THREE > 0:
        k3, v3 = _piece(k_in, v_in, at, ONE + TWO, keys, kv_row, WIDTH, THREE)
    per_log2 = scale * 1.4426950408889634
    if REST > 0:
        _tile(
            q_in, out, lse, at_q, at_out, at_lse, END, per_log2, k1, v1, k2, v2, k3, v3,
            queries, keys, q_row, o_row, WIDTH, REST, ONE, TWO, THREE, True,
        )  # fmt: skip
    for first in range(start, min(END, start + QUERIES * TILES), QUERIES):
        _tile(
            q_in, out, lse, at_q, at_out, at_lse, first, per_log2, k1, v1, k2, v2, k3, v3,
            queries, keys, q_row, o_row, WIDTH, QUERIES, ONE, TWO, THREE, False,
        )  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, *, together: bool | None = None) -> tuple[Tensor, Tensor]:
    """Attention's output [image, query, width], and the logarithms of softmax's denominators [image, head, query].

    q, k and v are [image, token, width], and may be parts of one tensor. `together` says whether one program takes all tiles of
    a head; None: where that is faster.
    """
    images, queries, width = q.shape
    out = torch.empty(images, queries, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(images, heads, queries, dtype=torch.float32, device=q.device)
    tile = min(64, max(_LEAST, next_power_of_2(queries)))
    tiles, rest = 1, 0
    if images * heads > 8 * num_sms(q.device) if together is None else together:
        tiles = ceil_div(queries, tile)
        rest = _LEAST if tiles > 1 and 0 < queries % tile <= _LEAST else 0
    one, two, three = split_pow2(k.shape[1])
    if not is_fake(q):
        _attention_forward_kernel[(images * heads * ceil_div(queries, tile * tiles),)](
            q, k, v, out, lse, (width // heads) ** -0.5,
            queries=queries, keys=k.shape[1], q_row=q.stride(1), kv_row=k.stride(1), HEADS=heads, WIDTH=width // heads,
            QUERIES=tile, TILES=tiles, REST=rest, ONE=one, TWO=two, THREE=three, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out, lse


def split_pow2(count: int) -> tuple[int, int, int]:
    """Up to three powers of two, from 16, that together are at least `count`, and little more; 0 for none."""
    rounded = ceil_div(count, _LEAST) * _LEAST
    parts = [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]
    if len(parts) > 3:
        parts = [next_power_of_2(rounded)]
    one, two, three = [*parts, 0, 0][:3]
    return one, two, three
