"""Attention's forward pass over few tokens: a program takes some of a head's queries and all of its keys at once.

So softmax needs no running maximum. The keys are split into up to three pieces, powers of two as Triton needs: 197 into
128 + 64 + 16 instead of 256. With few heads in all, as for a single image, every tile of queries is a program of its own; with
many, one program takes all tiles of a head and reads the keys once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import ceil_div, next_power_of_2, num_sms
from vitrail.models.fused.ops import attention_flops, op
from vitrail.models.fused.qk_norm import norm_queries, normalise

_MIN = 16  # rows or columns that tensor cores take


@triton.jit
def _load_keys(
    k_in, v_in, eps, kv_offset, start, keys,
    row: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    key = start + tl.arange(0, SIZE)
    offset, mask = kv_offset + key[:, None] * row + tl.arange(0, WIDTH)[None, :], (key < keys)[:, None]
    k, v = tl.load(k_in + offset, mask=mask, other=0.0), tl.load(v_in + offset, mask=mask, other=0.0)
    if QK_NORM:
        k = normalise(k, eps, WIDTH)[0].to(v.dtype)
    return k, v


@triton.jit
def _scores(q, k, start: tl.constexpr, keys: tl.constexpr, SIZE: tl.constexpr, TRANSPOSED: tl.constexpr):
    scores = tl.dot(k, q) if TRANSPOSED else tl.dot(q, tl.trans(k))
    if start + SIZE > keys:
        mask = start + tl.arange(0, SIZE) < keys
        scores = tl.where(tl.expand_dims(mask, 1 if TRANSPOSED else 0), scores, float("-inf"))
    return scores


@triton.jit
def _accumulate(scores, v, top, log2_scale, total, value, TRANSPOSED: tl.constexpr):
    """Add some keys' terms to softmax's denominator and to the weighted values."""
    AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    p = tl.exp2(scores * log2_scale - tl.expand_dims(top, AXIS))
    weights = p.to(v.dtype)
    return total + tl.sum(p, axis=AXIS), tl.dot(tl.trans(v), weights, value) if TRANSPOSED else tl.dot(weights, v, value)


@triton.jit
def _tile(
    q_in, q_weight, q_bias, k_weight, eps, out, lse, q_offset, out_offset, lse_offset, start, log2_scale, k1, v1, k2, v2, k3, v3,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, o_row: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    ONE: tl.constexpr, TWO: tl.constexpr, THREE: tl.constexpr, QK_NORM: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Attention of some queries from `start` over the three pieces of keys and values.

    Transposed, queries are columns: tensor cores take 64 rows, but as few as 8 columns.
    """
    AXIS: tl.constexpr = 0 if TRANSPOSED else 1  # of the keys
    query, channel = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    q = tl.load(q_in + q_offset + query[:, None] * q_row + channel[None, :], mask=(query < queries)[:, None], other=0.0)
    if QK_NORM:
        q = norm_queries(q, q_weight, q_bias, k_weight, eps, WIDTH)
    if TRANSPOSED:
        q = tl.trans(q)
    s1 = _scores(q, k1, 0, keys, ONE, TRANSPOSED)
    top = tl.max(s1, axis=AXIS)
    if TWO > 0:
        s2 = _scores(q, k2, ONE, keys, TWO, TRANSPOSED)
        top = tl.maximum(top, tl.max(s2, axis=AXIS))
    if THREE > 0:
        s3 = _scores(q, k3, ONE + TWO, keys, THREE, TRANSPOSED)
        top = tl.maximum(top, tl.max(s3, axis=AXIS))
    top *= log2_scale
    total = tl.zeros([QUERIES], tl.float32)
    value = tl.zeros([WIDTH, QUERIES] if TRANSPOSED else [QUERIES, WIDTH], tl.float32)
    total, value = _accumulate(s1, v1, top, log2_scale, total, value, TRANSPOSED)
    if TWO > 0:
        total, value = _accumulate(s2, v2, top, log2_scale, total, value, TRANSPOSED)
    if THREE > 0:
        total, value = _accumulate(s3, v3, top, log2_scale, total, value, TRANSPOSED)
    offset = out_offset + tl.expand_dims(query, AXIS) * o_row + tl.expand_dims(channel, 1 - AXIS)
    value *= tl.expand_dims(1.0 / total, AXIS)
    tl.store(out + offset, value.to(q.dtype), mask=tl.expand_dims(query < queries, AXIS))
    tl.store(lse + lse_offset + query, (top + tl.log2(total)) * 0.6931471805599453, mask=query < queries)


@triton.jit
def _attention_forward_kernel(
    q_in, k_in, v_in, q_weight, q_bias, k_weight, out, lse, scale, eps,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, kv_row: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, TILES: tl.constexpr, TAIL: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, THREE: tl.constexpr,
    QK_NORM: tl.constexpr,
):  # fmt: skip
    END: tl.constexpr = queries // QUERIES * QUERIES if TAIL > 0 else queries
    PROGRAMS: tl.constexpr = (END + QUERIES * TILES - 1) // (QUERIES * TILES)  # per head
    o_row: tl.constexpr = HEADS * WIDTH
    image, head = (tl.program_id(0) // PROGRAMS // HEADS).to(tl.int64), tl.program_id(0) // PROGRAMS % HEADS
    start = tl.program_id(0) % PROGRAMS * QUERIES * TILES
    kv_offset = image * keys * kv_row + head * WIDTH
    q_offset, out_offset = image * queries * q_row + head * WIDTH, image * queries * o_row + head * WIDTH
    lse_offset = (image * HEADS + head) * queries
    k1, v1 = _load_keys(k_in, v_in, eps, kv_offset, 0, keys, kv_row, WIDTH, ONE, QK_NORM)
    k2, v2, k3, v3 = k1, v1, k1, v1
    if TWO > 0:
        k2, v2 = _load_keys(k_in, v_in, eps, kv_offset, ONE, keys, kv_row, WIDTH, TWO, QK_NORM)
    if THREE > 0:
        k3, v3 = _load_keys(k_in, v_in, eps, kv_offset, ONE + TWO, keys, kv_row, WIDTH, THREE, QK_NORM)
    log2_scale = scale * 1.4426950408889634
    if TAIL > 0:
        _tile(
            q_in, q_weight, q_bias, k_weight, eps, out, lse, q_offset, out_offset, lse_offset, END, log2_scale,
            k1, v1, k2, v2, k3, v3,
            queries, keys, q_row, o_row, WIDTH, TAIL, ONE, TWO, THREE, QK_NORM, True,
        )  # fmt: skip
    for query in range(start, min(END, start + QUERIES * TILES), QUERIES):
        _tile(
            q_in, q_weight, q_bias, k_weight, eps, out, lse, q_offset, out_offset, lse_offset, query, log2_scale,
            k1, v1, k2, v2, k3, v3,
            queries, keys, q_row, o_row, WIDTH, QUERIES, ONE, TWO, THREE, QK_NORM, False,
        )  # fmt: skip


def _empty(
    q: Tensor, kv: Tensor | None, heads: int,
    norms: Sequence[Tensor] | None = None, eps: float = 0.0, whole_heads: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    images, queries, width = q.shape if kv is not None else (*q.shape[:2], q.shape[2] // 3)
    out = torch.empty(images, queries, width, dtype=q.dtype, device=q.device)
    return out, torch.empty(images, heads, queries, dtype=torch.float32, device=q.device)


@op(
    "attention_forward(Tensor q, Tensor? kv, int heads, Tensor[]? norms=None, float eps=0., bool? whole_heads=None)"
    " -> (Tensor, Tensor)",
    _empty,
    attention_flops,
)
def attention_forward(
    q: Tensor, kv: Tensor | None, heads: int,
    norms: Sequence[Tensor] | None = None, eps: float = 0.0, whole_heads: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention's output [image, query, width], and the logarithms of softmax's denominators [image, head, query].

    Give queries [image, query, width] with keys and values side by side [image, key, 2 · width], or all three side by side as `q`
    [image, token, 3 · width]. `norms`: weight and bias of the queries' norm, then of the keys' (`qk_norm`).
    `whole_heads`: whether one program takes all tiles of a head; default: where that is faster.
    """
    out, lse = _empty(q, kv, heads)
    images, queries, width = out.shape
    q, k, v = split_qkv(q.contiguous(), None if kv is None else kv.contiguous())
    tile = min(64, max(_MIN, next_power_of_2(queries)))
    tiles, tail = 1, 0
    if images * heads > 8 * num_sms(q.device) if whole_heads is None else whole_heads:
        tiles = ceil_div(queries, tile)
        tail = _MIN if tiles > 1 and 0 < queries % tile <= _MIN else 0
    one, two, three = split_pow2(k.shape[1])
    _attention_forward_kernel[(images * heads * ceil_div(queries, tile * tiles),)](
        q, k, v, *(norms or (None,) * 4)[:3], out, lse, (width // heads) ** -0.5, eps,
        queries=queries, keys=k.shape[1], q_row=q.stride(1), kv_row=k.stride(1), HEADS=heads, WIDTH=width // heads,
        QUERIES=tile, TILES=tiles, TAIL=tail, ONE=one, TWO=two, THREE=three, QK_NORM=bool(norms), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, lse


def split_qkv(q: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of queries, keys and values; without `kv` all three are in `q`."""
    if kv is None:
        q, k, v = q.chunk(3, dim=-1)
        return q, k, v
    k, v = kv.chunk(2, dim=-1)
    return q, k, v


def split_pow2(count: int) -> tuple[int, int, int]:
    """Return up to three powers of two, 16 or more, whose sum is at least `count` and little more; 0 for none."""
    rounded = ceil_div(count, _MIN) * _MIN
    parts = [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]
    if len(parts) > 3:
        parts = [next_power_of_2(rounded)]
    one, two, three = [*parts, 0, 0][:3]
    return one, two, three
