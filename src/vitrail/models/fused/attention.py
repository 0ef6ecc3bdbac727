"""Attention over few tokens: the library's kernel forward, and backward one program a head, which reads everything once.

Library kernels cut the sequence into blocks, add the queries' gradients up with atomic additions in float32 and convert them
after. With up to 256 tokens one program can hold a whole head's queries and walk over its keys; it writes the three gradients
where the product before wants them, side by side, together with the sums for that product's bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launching import is_fake, next_power_of_2, shared_memory

MOST_TOKENS = 256


@triton.jit
def _backward_kernel(
    q_in, k_in, v_in, out, dout, lse, dq_out, dk_out, dv_out, sums, scale,
    queries: tl.constexpr, keys: tl.constexpr, q_row: tl.constexpr, kv_row: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
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
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, keys, KEYS):
        key = start + tl.arange(0, KEYS)
        known = key < keys
        at_k = image * keys * kv_row + head * WIDTH + key[:, None] * kv_row + channel[None, :]
        k = tl.load(k_in + at_k, mask=known[:, None], other=0.0)
        v = tl.load(v_in + at_k, mask=known[:, None], other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2_E) - level[:, None])
        p = tl.where(known[None, :], p, 0.0)
        ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None])).to(q.dtype)
        dv = tl.dot(tl.trans(p.to(q.dtype)), do)
        dk = tl.dot(tl.trans(ds), q) * scale
        dq = tl.dot(ds, k, dq)
        tl.store(dk_out + at_k, dk.to(q.dtype), mask=known[:, None])
        tl.store(dv_out + at_k, dv.to(q.dtype), mask=known[:, None])
    dq *= scale
    tl.store(dq_out + at_q, dq.to(q.dtype), mask=real)
    tl.store(at_sum, tl.sum(dq, axis=0))


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Attention's output [image, query, width], and the logarithms of softmax's denominators [image, head, query].

    q, k and v are [image, token, width], and may be parts of one tensor.
    """
    images, queries, width = q.shape
    scale = (width // heads) ** -0.5
    if is_fake(q):
        return q.new_empty(images, queries, width), q.new_empty(images, heads, queries, dtype=torch.float32)
    split = [one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, k, v)]
    if not q.is_cuda:
        scores = (split[0] @ split[1].transpose(-2, -1)).float() * scale
        out, lse = scores.softmax(-1).to(q.dtype) @ split[2], scores.logsumexp(-1)
    elif forward_kernel(k.shape[1]) == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*split, None, True, 0.0, False, False, scale=scale)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*split, None, True, 0.0, False, scale=scale)
        lse = lse[..., :queries].contiguous()  # it comes padded
    return out.transpose(1, 2).flatten(2), lse.reshape(images, heads, queries)


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, heads: int, gradients: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Write the gradients of q, k and v into tensors laid out alike; returns their sums over tokens [image, 3 · width]."""
    images, queries, width = q.shape
    channels, padded = width // heads, max(16, next_power_of_2(queries))
    sums = torch.empty(images, 3 * width, dtype=torch.float32, device=q.device)
    if not is_fake(q):
        _backward_kernel[(images * heads,)](
            q, k, v, out, dout.contiguous(), lse, *gradients, sums, channels**-0.5,
            queries=queries, keys=k.shape[1], q_row=q.stride(1), kv_row=k.stride(1),
            HEADS=heads, WIDTH=channels, QUERIES=padded, KEYS=32 if padded == 128 else 64,
            num_warps=8 if padded > 128 else 4, num_stages=1,
        )  # fmt: skip
    return sums


def fits(tokens: int, channels: int, device: torch.device) -> bool:
    """Whether one program can hold a head: few tokens, and a width the tensor cores like (64 in the paper; ViT-H has 80)."""
    if tokens > MOST_TOKENS or channels not in (16, 32, 64, 128):
        return False
    queries = next_power_of_2(tokens)
    bytes_shared = 2 * (2 * queries * channels + queries * 64 + 64 * channels)  # two tiles of queries, one of weights, one of keys
    return bytes_shared * 1.05 < shared_memory(device)


def forward_kernel(tokens: int) -> str:
    """The library's kernel that measured fastest (docs/performance.md)."""
    return "efficient" if tokens <= 64 else "cudnn"
