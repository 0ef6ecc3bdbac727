"""Layer norm of each head's queries and keys (`qk_norm`), forward and backward.

The attention kernels for few tokens normalise what they have just loaded, with the functions here: that costs no memory traffic.
Backward normalises again instead of reading it. For torch's attention over many tokens there is a pass of its own.

With normalised q and k, weights w and biases b, the scores are (w_q q + b_q) · (w_k k + b_k). Softmax ignores what all scores of a
query have in common, so b_k has no effect, and the rest is (w_q w_k q + b_q w_k) · k. The attention kernels compute that: keys need
no weight, and all gradients of weights and biases come from sums over queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.launch import ceil_div, next_power_of_2, num_sms
from vitrail.models.fused.ops import once_differentiable, op

_VALUES = 4096  # of a tile: rows · channels
_ROWS, _COLUMNS = 1024, 4  # of a tile of partial sums: narrow, so that several SMs take part


@triton.jit
def normalise(x, eps, WIDTH: tl.constexpr):
    """Return rows with mean 0 and standard deviation 1 in float32, and rstd. Columns from WIDTH on must be 0."""
    x = x.to(tl.float32)
    mean = tl.sum(x, axis=1) / WIDTH
    centred = x - mean[:, None]
    if x.shape[1] > WIDTH:
        centred = tl.where((tl.arange(0, x.shape[1]) < WIDTH)[None, :], centred, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / WIDTH + eps)
    return centred * rstd[:, None], rstd


@triton.jit
def normalise_backward(grad, normed, rstd, WIDTH: tl.constexpr):
    """Return the gradient before `normalise`, given that after it."""
    projection = tl.sum(grad * normed, axis=1) / WIDTH
    grad_mean = tl.sum(grad, axis=1) / WIDTH
    return (grad - grad_mean[:, None] - normed * projection[:, None]) * rstd[:, None]


@triton.jit
def norm_queries(q, q_weight, q_bias, k_weight, eps, WIDTH: tl.constexpr):
    """Return queries for keys that are only normalised: w_q w_k q + b_q w_k, in their precision."""
    channel = tl.arange(0, WIDTH)
    normed, _ = normalise(q, eps, WIDTH)
    weight, bias = tl.load(q_weight + channel).to(tl.float32), tl.load(q_bias + channel).to(tl.float32)
    return ((normed * weight[None, :] + bias[None, :]) * tl.load(k_weight + channel).to(tl.float32)[None, :]).to(q.dtype)


@triton.jit
def _norm_gradients_kernel(
    sums, q_weight, q_bias, k_weight, total, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dweight, dbias = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        pointer, mask = sums + row[:, None] * 2 * WIDTH + channel[None, :], (row < rows)[:, None]
        dweight += tl.load(pointer, mask=mask, other=0.0)
        dbias += tl.load(pointer + WIDTH, mask=mask, other=0.0)
    dweight, dbias = tl.sum(dweight, axis=0), tl.sum(dbias, axis=0)
    weight, bias = tl.load(q_weight + channel).to(tl.float32), tl.load(q_bias + channel).to(tl.float32)
    key_weight = tl.load(k_weight + channel).to(tl.float32)
    tl.store(total + channel, dweight * key_weight)
    tl.store(total + WIDTH + channel, dbias * key_weight)
    tl.store(total + 2 * WIDTH + channel, dweight * weight + dbias * bias)
    tl.store(total + 3 * WIDTH + channel, tl.zeros([COLUMNS], tl.float32))


def norm_gradients(sums: Tensor, norms: Sequence[Tensor], total: Tensor) -> None:
    """Write the gradients of `norms` [4, channel], given those of weight and bias in `norm_queries` [program, 2, channel]."""
    width = sums.shape[2]
    _norm_gradients_kernel[(width // _COLUMNS,)](
        sums, *norms[:3], total, len(sums), WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
    )


@triton.jit
def _offsets(start, rows, heads, part, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Return where rows (a token's channels in one head) of queries, keys or values are, and which values exist."""
    row, channel = start + tl.arange(0, ROWS), tl.arange(0, PADDED)
    group = (row // heads).to(tl.int64) * 3 * heads + part * heads + row % heads
    return group[:, None] * WIDTH + channel[None, :], (row < rows)[:, None] & (channel < WIDTH)[None, :]


@triton.jit
def _load_vector(of_queries, of_keys, part, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    channel = tl.arange(0, PADDED)
    q, k = (tl.load(of_queries + channel, channel < WIDTH, 0.0), tl.load(of_keys + channel, channel < WIDTH, 0.0))
    return tl.where(part == 0, q, k).to(tl.float32)[None, :]


@triton.jit
def _qk_norm_kernel(
    qkv, q_weight, q_bias, k_weight, k_bias, out, rows, heads, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    offset, mask = _offsets(tl.program_id(0) * ROWS, rows, heads, part, WIDTH, ROWS, PADDED)
    x = tl.load(qkv + offset, mask=mask, other=0.0).to(tl.float32)
    if part < 2:
        x, _ = normalise(x, eps, WIDTH)
        x = x * _load_vector(q_weight, k_weight, part, WIDTH, PADDED) + _load_vector(q_bias, k_bias, part, WIDTH, PADDED)
    tl.store(out + offset, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_backward_kernel(
    qkv, grad_out, q_weight, k_weight, dqkv, sums, rows, heads, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    program, part, channel = tl.program_id(0), tl.program_id(1), tl.arange(0, PADDED)
    dweight, dbias = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
    weight = _load_vector(q_weight, k_weight, part, WIDTH, PADDED)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        offset, mask = _offsets(start, rows, heads, part, WIDTH, ROWS, PADDED)
        grad = tl.load(grad_out + offset, mask=mask, other=0.0).to(tl.float32)
        if part < 2:
            normed, rstd = normalise(tl.load(qkv + offset, mask=mask, other=0.0), eps, WIDTH)
            dweight += grad * normed
            dbias += grad
            grad = normalise_backward(grad * weight, normed, rstd, WIDTH)
        tl.store(dqkv + offset, grad.to(dqkv.dtype.element_ty), mask=mask)
    if part < 2:
        into = sums + (program * 4 + part * 2) * WIDTH + channel
        tl.store(into, tl.sum(dweight, axis=0), mask=channel < WIDTH)
        tl.store(into + WIDTH, tl.sum(dbias, axis=0), mask=channel < WIDTH)


def _empty(qkv: Tensor, heads: int, norms: Sequence[Tensor], eps: float) -> Tensor:
    return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)


@op("qk_norm(Tensor qkv, int heads, Tensor[] norms, float eps) -> Tensor", _empty)
def _qk_norm(qkv: Tensor, heads: int, norms: Sequence[Tensor], eps: float) -> Tensor:
    out = _empty(qkv, heads, norms, eps)
    rows, sizes = _sizes(qkv, heads)
    _qk_norm_kernel[(ceil_div(rows, sizes["ROWS"]), 3)](qkv.contiguous(), *norms, out, rows, heads, eps, **sizes, num_warps=4)
    return out


def _empty_backward(qkv: Tensor, grad_out: Tensor, heads: int, norms: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    return dqkv, torch.empty(4, qkv.shape[-1] // (3 * heads), dtype=torch.float32, device=qkv.device)


@op("qk_norm_backward(Tensor qkv, Tensor grad_out, int heads, Tensor[] norms, float eps) -> (Tensor, Tensor)", _empty_backward)
def _qk_norm_backward(qkv: Tensor, grad_out: Tensor, heads: int, norms: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of queries, keys and values, and those of the norms [4, channel] in float32."""
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    rows, sizes = _sizes(qkv, heads)
    programs = min(ceil_div(rows, sizes["ROWS"]), 4 * num_sms(qkv.device))
    sums = torch.empty(programs, 4, sizes["WIDTH"], dtype=torch.float32, device=qkv.device)
    _qk_norm_backward_kernel[(programs, 3)](
        qkv.contiguous(), grad_out.contiguous(), norms[0], norms[2], dqkv, sums, rows, heads, eps, **sizes, num_warps=4
    )
    return dqkv, column_sum(sums, torch.float32)


def _sizes(qkv: Tensor, heads: int) -> tuple[int, dict[str, int]]:
    """Return the number of rows that each of queries, keys and values has, and a tile's sizes."""
    width = qkv.shape[-1] // (3 * heads)
    padded = next_power_of_2(width)
    return qkv.numel() // (3 * width), {"WIDTH": width, "ROWS": max(1, _VALUES // padded), "PADDED": padded}


class _QkNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, eps: float, *norms: Tensor) -> Tensor:
        ctx.save_for_backward(qkv, *norms)
        ctx.heads, ctx.eps = heads, eps
        return _qk_norm(qkv, heads, norms, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        qkv, *norms = ctx.saved_tensors
        dqkv, dnorms = _qk_norm_backward(qkv, grad_out, ctx.heads, norms, ctx.eps)
        return dqkv, None, None, *(grad.to(norm.dtype) for grad, norm in zip(dnorms, norms, strict=True))


def qk_norm(qkv: Tensor, heads: int, norms: Sequence[Tensor], eps: float) -> Tensor:
    """Return queries, keys and values [image, token, 3 · width] with each head's queries and keys normalised.

    `norms`: weight and bias of the queries' norm, then those of the keys'.
    """
    return _QkNorm.apply(qkv, heads, eps, *norms)  # type: ignore[no-any-return]
