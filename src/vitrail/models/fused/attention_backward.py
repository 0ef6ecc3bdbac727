"""Attention's backward pass over few tokens: one program per head, which reads everything once.

cuDNN and FlashAttention split the sequence into blocks, sum the queries' gradients with atomics in float32 and convert them
afterwards. With up to 256 tokens one program can hold all queries of a head and loop over its keys; it writes the three gradients
side by side, as the weight gradient of the matmul before reads them, together with the sums for that matmul's bias.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.attention_forward import split_qkv
from vitrail.models.fused.launch import next_power_of_2, shared_memory, sm_major
from vitrail.models.fused.ops import attention_flops, op
from vitrail.models.fused.qk_norm import norm_gradients, norm_queries, normalise, normalise_backward

MAX_TOKENS = 256
_STAGES = 4  # tiles of keys and values in flight
_MAX_REGISTERS = 168  # so that an SM holds three programs of 128 threads


@triton.jit
def _key_tile(
    q, do, delta, log2_lse, dq, dk_sum, k_in, v_in, dk_out, dv_out, kv_offset, start, scale, eps,
    keys: tl.constexpr, row: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, TRANSPOSED: tl.constexpr,
    QK_NORM: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `SIZE` keys and values from `start`.

    Return the queries' gradient with their part added and, with `QK_NORM`, so the sum of the keys' gradients.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    key, channel = start + tl.arange(0, SIZE), tl.arange(0, WIDTH)
    key_mask = key < (start + SIZE if FULL else keys)
    offset, mask = kv_offset + key[:, None] * row + channel[None, :], key_mask[:, None]
    k = tl.load(k_in + offset, mask=mask, other=0.0)
    v = tl.load(v_in + offset, mask=mask, other=0.0)
    if QK_NORM:
        k, rstd = normalise(k, eps, WIDTH)
        k = k.to(q.dtype)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2_E) - log2_lse[:, None])
    if not FULL:
        p = tl.where(key_mask[None, :], p, 0.0)
    ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None])).to(q.dtype)
    if TRANSPOSED:  # tensor cores take 64 rows of the left operand, but few columns of the right one
        dv = tl.trans(tl.dot(tl.trans(do), p.to(q.dtype)))
        dk = tl.trans(tl.dot(tl.trans(q), ds))
    else:
        dv = tl.dot(tl.trans(p.to(q.dtype)), do)
        dk = tl.dot(tl.trans(ds), q)
    dk *= scale
    if QK_NORM:
        dk = normalise_backward(dk, k.to(tl.float32), rstd, WIDTH)
        dk_sum += tl.sum(dk, axis=0)
    tl.store(dk_out + offset, dk.to(q.dtype), mask=mask)
    tl.store(dv_out + offset, dv.to(q.dtype), mask=mask)
    return tl.dot(ds, k, dq), dk_sum


@triton.jit
def _attention_backward_kernel(
    q_in, k_in, v_in, q_weight, q_bias, k_weight, out, dout, lse, dq_out, dk_out, dv_out, sums, norm_sums, scale, eps,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, kv_row: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    query, channel = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    mask, o_row = (query < queries)[:, None], HEADS * WIDTH
    q_offset = image * queries * q_row + head * WIDTH + query[:, None] * q_row + channel[None, :]
    o_offset = image * queries * o_row + head * WIDTH + query[:, None] * o_row + channel[None, :]
    q = tl.load(q_in + q_offset, mask=mask, other=0.0)
    if QK_NORM:
        q = norm_queries(q, q_weight, q_bias, k_weight, eps, WIDTH)
    do = tl.load(dout + o_offset, mask=mask, other=0.0)
    o = tl.load(out + o_offset, mask=mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    log2_lse = tl.load(lse + (image * HEADS + head) * queries + query, mask=query < queries, other=float("inf")) * LOG2_E
    # A query's weights sum to one, so the values' gradients sum to the output's. Softmax ignores a bias added to all keys, so the
    # gradients of the keys it sees sum to zero. Stored here and not at the end, so that no registers are held for it.
    sum_ptr = sums + image * 3 * o_row + head * WIDTH + channel
    if not QK_NORM:
        tl.store(sum_ptr + o_row, tl.zeros([WIDTH], tl.float32))
    tl.store(sum_ptr + 2 * o_row, tl.sum(do.to(tl.float32), axis=0))
    kv_offset = image * keys * kv_row + head * WIDTH
    dq, dk_sum = tl.zeros([QUERIES, WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    END: tl.constexpr = keys // KEYS * KEYS
    for start in range(0, END, KEYS):
        dq, dk_sum = _key_tile(
            q, do, delta, log2_lse, dq, dk_sum, k_in, v_in, dk_out, dv_out, kv_offset, start, scale, eps,
            keys, kv_row, WIDTH, KEYS, True, False, QK_NORM,
        )  # fmt: skip
    if TAIL > 0:
        dq, dk_sum = _key_tile(
            q, do, delta, log2_lse, dq, dk_sum, k_in, v_in, dk_out, dv_out, kv_offset, END, scale, eps,
            keys, kv_row, WIDTH, TAIL, False, TAIL < KEYS, QK_NORM,
        )  # fmt: skip
    dq *= scale
    if QK_NORM:
        tl.store(sum_ptr + o_row, dk_sum)
        normed, rstd = normalise(tl.load(q_in + q_offset, mask=mask, other=0.0), eps, WIDTH)
        norm_ptr = norm_sums + tl.program_id(0) * 2 * WIDTH + channel
        tl.store(norm_ptr, tl.sum(dq * normed, axis=0))
        tl.store(norm_ptr + WIDTH, tl.sum(dq, axis=0))
        weight = tl.load(q_weight + channel).to(tl.float32) * tl.load(k_weight + channel).to(tl.float32)
        dq = normalise_backward(dq * weight[None, :], normed, rstd, WIDTH)
    tl.store(dq_out + q_offset, dq.to(q.dtype), mask=mask)
    tl.store(sum_ptr, tl.sum(dq, axis=0))


def _empty(
    q: Tensor, kv: Tensor | None, out: Tensor, dout: Tensor, lse: Tensor, heads: int,
    norms: Sequence[Tensor] | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dkv = torch.empty(0 if kv is None else kv.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty(len(q), 3 * out.shape[2], dtype=torch.float32, device=q.device)
    return dq, dkv, sums, torch.empty(4 if norms else 0, out.shape[2] // heads, dtype=torch.float32, device=q.device)


@op(
    "attention_backward(Tensor q, Tensor? kv, Tensor out, Tensor dout, Tensor lse, int heads, Tensor[]? norms=None, float eps=0.)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _empty,
    functools.partial(attention_flops, matmuls=5),  # the scores again, and the gradients of weights, values, queries and keys
)
def attention_backward(
    q: Tensor, kv: Tensor | None, out: Tensor, dout: Tensor, lse: Tensor, heads: int,
    norms: Sequence[Tensor] | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `q` and `kv` (as in `attention_forward`), and their sums over tokens [image, 3 · width].

    And those of `norms` [4, channel], in float32; empty without norms.
    """
    dq, dkv, sums, dnorms = _empty(q, kv, out, dout, lse, heads, norms)
    gradients = split_qkv(dq, None if kv is None else dkv)
    q, k, v = split_qkv(q.contiguous(), None if kv is None else kv.contiguous())
    images, queries, width = out.shape
    channels, padded = width // heads, max(16, next_power_of_2(queries))
    norm_sums = torch.empty(images * heads, 2, channels, dtype=torch.float32, device=q.device) if norms else None
    few = padded == 128 or (norms and padded == MAX_TOKENS)  # keys at a time: queries or norms take the registers
    tile = tail = 32 if few else 64
    if padded == MAX_TOKENS:  # with fewer warps the compiler gets short tails wrong (seen with Triton 3.6)
        tail = max(16, next_power_of_2(k.shape[1] % tile))
    _attention_backward_kernel[(images * heads,)](
        q, k, v, *(norms or (None,) * 4)[:3], out.contiguous(), dout.contiguous(), lse, *gradients, sums, norm_sums,
        channels**-0.5, eps,
        queries=queries, keys=k.shape[1], q_row=q.stride(1), kv_row=k.stride(1),
        HEADS=heads, WIDTH=channels, QUERIES=padded, KEYS=tile, TAIL=tail if k.shape[1] % tile else 0, QK_NORM=bool(norms),
        num_warps=8 if padded > 128 else 4, num_stages=_STAGES, maxnreg=_MAX_REGISTERS if norms and padded == 64 else None,
    )  # fmt: skip
    if norms and norm_sums is not None:
        norm_gradients(norm_sums, norms, dnorms)
    return dq, dkv, sums, dnorms


def fits(tokens: int, channels: int, device: torch.device) -> bool:
    """Return whether one program can hold a head: few tokens, and a width for tensor cores (64 in the paper; ViT-H has 80).

    Needs Hopper or a data-centre Blackwell GPU: others multiply from registers, of which there are too few.
    """
    if tokens > MAX_TOKENS or channels not in (16, 32, 64, 128) or sm_major(device) not in (9, 10):
        return False
    queries = next_power_of_2(tokens)
    # Two tiles of queries, one of weights, and the keys and values in flight.
    return 2 * (2 * queries * channels + queries * 64 + _STAGES * 2 * 64 * channels) < shared_memory(device)
