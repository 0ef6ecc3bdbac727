"""Attention's backward pass over few tokens: one program per head, which reads everything once.

cuDNN and FlashAttention split the sequence into blocks, sum the queries' gradients with atomics in float32 and convert them
afterwards. With up to 256 tokens one program can hold all queries of a head and loop over its keys; it writes the three gradients
side by side, as the weight gradient of the matmul before reads them, together with the sums for that matmul's bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.attention_forward import split_qkv
from vitrail.models.fused.launch import next_power_of_2, shared_memory, sm_major
from vitrail.models.fused.ops import op

MAX_TOKENS = 256
_STAGES = 4  # tiles of keys and values in flight


@triton.jit
def _key_tile(
    q, do, delta, log2_lse, dq, k_in, v_in, dk_out, dv_out, kv_offset, start, scale,
    keys: tl.constexpr, row: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `SIZE` keys and values from `start`; return the queries' gradient with their part added."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    key = start + tl.arange(0, SIZE)
    key_mask = key < (start + SIZE if FULL else keys)
    offset, mask = kv_offset + key[:, None] * row + tl.arange(0, WIDTH)[None, :], key_mask[:, None]
    k = tl.load(k_in + offset, mask=mask, other=0.0)
    v = tl.load(v_in + offset, mask=mask, other=0.0)
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
    tl.store(dk_out + offset, (dk * scale).to(q.dtype), mask=mask)
    tl.store(dv_out + offset, dv.to(q.dtype), mask=mask)
    return tl.dot(ds, k, dq)


@triton.jit
def _attention_backward_kernel(
    q_in, k_in, v_in, out, dout, lse, dq_out, dk_out, dv_out, sums, scale,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, kv_row: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    query, channel = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    mask, o_row = (query < queries)[:, None], HEADS * WIDTH
    q_offset = image * queries * q_row + head * WIDTH + query[:, None] * q_row + channel[None, :]
    o_offset = image * queries * o_row + head * WIDTH + query[:, None] * o_row + channel[None, :]
    q = tl.load(q_in + q_offset, mask=mask, other=0.0)
    do = tl.load(dout + o_offset, mask=mask, other=0.0)
    o = tl.load(out + o_offset, mask=mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    log2_lse = tl.load(lse + (image * HEADS + head) * queries + query, mask=query < queries, other=float("inf")) * LOG2_E
    # A query's weights sum to one, so the values' gradients sum to the output's. Softmax ignores a bias added to all keys, so the
    # keys' gradients sum to zero. Stored here and not at the end, so that no registers are held for it.
    sum_ptr = sums + image * 3 * o_row + head * WIDTH + channel
    tl.store(sum_ptr + o_row, tl.zeros([WIDTH], tl.float32))
    tl.store(sum_ptr + 2 * o_row, tl.sum(do.to(tl.float32), axis=0))
    kv_offset = image * keys * kv_row + head * WIDTH
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)
    END: tl.constexpr = keys // KEYS * KEYS
    for start in range(0, END, KEYS):
        dq = _key_tile(
            q, do, delta, log2_lse, dq, k_in, v_in, dk_out, dv_out, kv_offset, start, scale, keys, kv_row, WIDTH, KEYS, True, False
        )
    if TAIL > 0:
        dq = _key_tile(
            q,
            do,
            delta,
            log2_lse,
            dq,
            k_in,
            v_in,
            dk_out,
            dv_out,
            kv_offset,
            END,
            scale,
            keys,
            kv_row,
            WIDTH,
            TAIL,
            False,
            TAIL < KEYS,
        )
    dq *= scale
    tl.store(dq_out + q_offset, dq.to(q.dtype), mask=mask)
    tl.store(sum_ptr, tl.sum(dq, axis=0))


def _empty(q: Tensor, kv: Tensor | None, out: Tensor, dout: Tensor, lse: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dkv = torch.empty(0 if kv is None else kv.shape, dtype=q.dtype, device=q.device)
    return dq, dkv, torch.empty(len(q), 3 * out.shape[2], dtype=torch.float32, device=q.device)


@op("attention_backward(Tensor q, Tensor? kv, Tensor out, Tensor dout, Tensor lse, int heads) -> (Tensor, Tensor, Tensor)", _empty)
def attention_backward(
    q: Tensor, kv: Tensor | None, out: Tensor, dout: Tensor, lse: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q` and `kv` (as in `attention_forward`), and their sums over tokens [image, 3 · width]."""
    dq, dkv, sums = _empty(q, kv, out, dout, lse, heads)
    gradients = split_qkv(dq, None if kv is None else dkv)
    q, k, v = split_qkv(q.contiguous(), None if kv is None else kv.contiguous())
    images, queries, width = out.shape
    channels, padded = width // heads, max(16, next_power_of_2(queries))
    tile = tail = 32 if padded == 128 else 64
    if padded == MAX_TOKENS:  # with fewer warps the compiler gets short tails wrong (seen with Triton 3.6)
        tail = max(16, next_power_of_2(k.shape[1] % tile))
    _attention_backward_kernel[(images * heads,)](
        q, k, v, out.contiguous(), dout.contiguous(), lse, *gradients, sums, channels**-0.5,
        queries=queries, keys=k.shape[1], q_row=q.stride(1), kv_row=k.stride(1),
        HEADS=heads, WIDTH=channels, QUERIES=padded, KEYS=tile, TAIL=tail if k.shape[1] % tile else 0,
        num_warps=8 if padded > 128 else 4, num_stages=_STAGES,
    )  # fmt: skip
    return dq, dkv, sums


def fits(tokens: int, channels: int, device: torch.device) -> bool:
    """Return whether one program can hold a head: few tokens, and a width for tensor cores (64 in the paper; ViT-H has 80).

    Needs Hopper or a data-centre Blackwell GPU: others multiply from registers, of which there are too few.
    """
    if tokens > MAX_TOKENS or channels not in (16, 32, 64, 128) or sm_major(device) not in (9, 10):
        return False
    queries = next_power_of_2(tokens)
    # Two tiles of queries, one of weights, and the keys and values in flight.
    return 2 * (2 * queries * channels + queries * 64 + _STAGES * 2 * 64 * channels) < shared_memory(device)
