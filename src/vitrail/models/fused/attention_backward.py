"""Attention's backward pass over few tokens: one program a head, which reads everything once.

Library kernels cut the sequence into blocks, add the queries' gradients up with atomic additions in float32 and convert them
after. With up to 256 tokens one program can hold a whole head's queries and walk over its keys; it writes the three gradients
where the product before wants them, side by side, together with the sums for that product's bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import is_fake, next_power_of_2, shared_memory, sm_major

MOST_TOKENS = 256
_AHEAD = 4  # tiles of keys and values on their way at once


@triton.jit
def _some_keys(
    q, do, delta, level, dq, k_in, v_in, dk_out, dv_out, at, start, scale,
    keys: tl.constexpr, row: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Gradients at `SIZE` keys and values from `start`, and what they add to the queries'."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    key = start + tl.arange(0, SIZE)
    known = key < (start + SIZE if WHOLE else keys)
    place, mask = at + key[:, None] * row + tl.arange(0, WIDTH)[None, :], known[:, None]
    k = tl.load(k_in + place, mask=mask, other=0.0)
    v = tl.load(v_in + place, mask=mask, other=0.0)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2_E) - level[:, None])
    if not WHOLE:
        p = tl.where(known[None, :], p, 0.0)
    ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None])).to(q.dtype)
    if TURNED:  # tensor cores want 64 rows of their left side, and few columns of the right
        dv = tl.trans(tl.dot(tl.trans(do), p.to(q.dtype)))
        dk = tl.trans(tl.dot(tl.trans(q), ds))
    else:
        dv = tl.dot(tl.trans(p.to(q.dtype)), do)
        dk = tl.dot(tl.trans(ds), q)
    tl.store(dk_out + place, (dk * scale).to(q.dtype), mask=mask)
    tl.store(dv_out + place, dv.to(q.dtype), mask=mask)
    return tl.dot(ds, k, dq)


@triton.jit
def _attention_backward_kernel(
    q_in, k_in, v_in, out, dout, lse, dq_out, dk_out, dv_out, sums, scale,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, kv_row: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    query, channel = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    real, o_row = (query < queries)[:, None], HEADS * WIDTH
    at_q = image * queries * q_row + head * WIDTH + query[:, None] * q_row + channel[None, :]
    at_o = image * queries * o_row + head * WIDTH + query[:, None] * o_row + channel[None, :]
    q = tl.load(q_in + at_q, mask=real, other=0.0)
    do = tl.load(dout + at_o, mask=real, other=0.0)
    o = tl.load(out + at_o, mask=real, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    level = tl.load(lse + (image * HEADS + head) * queries + query, mask=query < queries, other=float("inf")) * LOG2_E
    # A query's weights sum to one, so the values' gradients sum to the output's; and what a softmax takes from one weight it
    # gives to the others, so the keys' gradients sum to nothing: a bias added to all keys changes nothing. Stored here, and not
    # at the end, so that no registers are held for it.
    at_sum = sums + image * 3 * o_row + head * WIDTH + channel
    tl.store(at_sum + o_row, tl.zeros([WIDTH], tl.float32))
    tl.store(at_sum + 2 * o_row, tl.sum(do.to(tl.float32), axis=0))
    at_k = image * keys * kv_row + head * WIDTH
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)
    END: tl.constexpr = keys // KEYS * KEYS
    for start in range(0, END, KEYS):
        dq = _some_keys(
            q, do, delta, level, dq, k_in, v_in, dk_out, dv_out, at_k, start, scale, keys, kv_row, WIDTH, KEYS, True, False
        )
    if REST > 0:
        dq = _some_keys(
            q, do, delta, level, dq, k_in, v_in, dk_out, dv_out, at_k, END, scale, keys, kv_row, WIDTH, REST, False, REST < KEYS
        )
    dq *= scale
    tl.store(dq_out + at_q, dq.to(q.dtype), mask=real)
    tl.store(at_sum, tl.sum(dq, axis=0))


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, heads: int, gradients: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Write the gradients of q, k and v into tensors laid out alike; returns their sums over tokens [image, 3 · width]."""
    images, queries, width = q.shape
    channels, padded = width // heads, max(16, next_power_of_2(queries))
    at_once = rest = 32 if padded == 128 else 64
    if padded == MOST_TOKENS:  # with fewer warps the compiler gets short rests wrong (seen with Triton 3.6)
        rest = max(16, next_power_of_2(k.shape[1] % at_once))
    sums = torch.empty(images, 3 * width, dtype=torch.float32, device=q.device)
    if not is_fake(q):
        _attention_backward_kernel[(images * heads,)](
            q, k, v, out, dout.contiguous(), lse, *gradients, sums, channels**-0.5,
            queries=queries, keys=k.shape[1], q_row=q.stride(1), kv_row=k.stride(1),
            HEADS=heads, WIDTH=channels, QUERIES=padded, KEYS=at_once, REST=rest if k.shape[1] % at_once else 0,
            num_warps=8 if padded > 128 else 4, num_stages=_AHEAD,
        )  # fmt: skip
    return sums


def fits(tokens: int, channels: int, device: torch.device) -> bool:
    """Whether one program can hold a head: few tokens, and a width the tensor cores like (64 in the paper; ViT-H has 80).

    It takes a Hopper or a large Blackwell GPU: the others multiply from registers, and these would not suffice.
    """
    if tokens > MOST_TOKENS or channels not in (16, 32, 64, 128) or sm_major(device) not in (9, 10):
        return False
    queries = next_power_of_2(tokens)
    # Two tiles of queries, one of weights, and the keys and values that are read ahead.
    return 2 * (2 * queries * channels + queries * 64 + _AHEAD * 2 * 64 * channels) < shared_memory(device)
