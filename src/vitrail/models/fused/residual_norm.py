"""Residual addition and layer norm in one pass over memory, forward and backward.

A branch's output, its bias and its stochastic depth are added to the residual stream, and the sum is normalised for the next. The
norm's own weights are left to what follows it (`folding.py`). The backward pass needs what was written, not the stream: it gives
the stream's gradient, the branch's gradient in low precision, and the gradient of the branch's bias, all from reading
everything once. Sums over rows are kept in registers, in a fixed order: results are the same from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.dropout import kept
from vitrail.models.fused.launch import is_fake, next_power_of_2, num_sms


@triton.jit
def _norm_forward_kernel(
    x, branch, bias, keep, seed, x_out, y, mean_out, rstd_out,
    tokens, eps, rate,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    DROPS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, PADDED)
    inside = column < WIDTH
    place = row.to(tl.int64) * WIDTH + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_KEEP:
            added *= tl.load(keep + row // tokens)
        if DROPS:
            added *= kept(seed, place, rate)
        value += added
        stored = value.to(x_out.dtype.element_ty)
        tl.store(x_out + place, stored, mask=inside)
        if not NORMS:  # the statistics of what a matmul will read
            value = stored.to(tl.float32)
    mean = tl.sum(value) / WIDTH
    centred = tl.where(inside, value - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    if NORMS:
        tl.store(y + place, (centred * rstd).to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)


@triton.jit
def _norm_backward_kernel(
    dy, dx_next, y, rstd_in, keep, seed, dx, dbranch, sums,
    rows, tokens, rate,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_NEXT: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    program, column = tl.program_id(0), tl.arange(0, PADDED)
    inside = column < WIDTH
    sum_bias = tl.zeros([PADDED], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * WIDTH + column
        slope = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        along = tl.sum(slope * normed) / WIDTH
        level = tl.sum(slope) / WIDTH
        result = (slope - normed * along - level) * tl.load(rstd_in + row)
        if HAS_NEXT:
            result += tl.load(dx_next + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask=inside)
        if ADDS:
            if HAS_KEEP:
                result *= tl.load(keep + row // tokens)
            if DROPS:
                result *= kept(seed, place, rate)
            tl.store(dbranch + place, result.to(dbranch.dtype.element_ty), mask=inside)
            sum_bias += result
    if ADDS:
        tl.store(sums + program * WIDTH + column, sum_bias, mask=inside)


class ResidualNorm(torch.autograd.Function):
    """(x, branch, bias, …) → (x + keep · dropout(branch + bias), the same with mean 0 and deviation 1 in the given precision).

    `branch` may be None: then x is only normalised. `keep` is stochastic depth's factor for each image, or None. `seed` is that
    of a dropout with `rate`, or None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, keep: Tensor | None, seed: Tensor | None,
        rate: float, eps: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        out, _, rstd = _forward(x.contiguous(), branch, bias, keep, seed, rate, eps, y)
        ctx.save_for_backward(y, rstd, keep, seed)
        ctx.rate, ctx.dtypes = rate, (x.dtype, None if branch is None else branch.dtype, None if bias is None else bias.dtype)
        ctx.set_materialize_grads(False)
        return out, y

    @staticmethod
    def backward(ctx: Any, dx_next: Tensor | None, dy: Tensor | None) -> Any:
        y, rstd, keep, seed = ctx.saved_tensors
        of_stream, of_branch, of_bias = ctx.dtypes
        dy = torch.zeros_like(y) if dy is None else dy.contiguous()
        width, rows, adds = y.shape[-1], len(rstd), of_branch is not None
        dx = torch.empty(y.shape, dtype=of_stream, device=y.device)
        dbranch = torch.empty(y.shape, dtype=of_branch, device=y.device) if adds else None
        padded = next_power_of_2(width)
        programs = min(rows, num_sms(y.device) * (16 if padded <= 512 else 8))
        sums = torch.empty(programs, width, dtype=torch.float32, device=y.device) if adds else None
        dx_next = None if dx_next is None else dx_next.contiguous()
        if not is_fake(y):
            _norm_backward_kernel[(programs,)](
                dy, dx_next, y, rstd, keep, seed, dx, dbranch, sums, rows, y.shape[1], ctx.rate,
                WIDTH=width, PADDED=padded,
                ADDS=adds, HAS_KEEP=keep is not None, HAS_NEXT=dx_next is not None, DROPS=seed is not None,
                num_warps=max(1, min(8, padded // 256)),
            )  # fmt: skip
        dbias = None if sums is None or of_bias is None else column_sum(sums, of_bias)
        return dx, dbranch, dbias, None, None, None, None, None


def residual_stats(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, keep: Tensor | None, seed: Tensor | None, rate: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x + keep · dropout(branch + bias), and mean and rstd of its rows, as stored, in float32. Has no gradient."""
    out, mean, rstd = _forward(x.contiguous(), branch, bias, keep, seed, rate, eps, None)
    assert mean is not None
    return out, mean, rstd


def _forward(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, keep: Tensor | None, seed: Tensor | None, rate: float, eps: float,
    y: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """The sum, and mean and rstd of its rows; where `y` is given, the normalised sum is written to it instead of the mean."""
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    out = x.view_as(x) if branch is None else torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if y is None else None
    if not is_fake(x):
        _norm_forward_kernel[(rows,)](
            x, branch, bias, keep, seed, out, y, mean, rstd, x.shape[1], eps, rate,
            WIDTH=width, PADDED=next_power_of_2(width), ADDS=branch is not None, HAS_BIAS=bias is not None,
            HAS_KEEP=keep is not None, DROPS=seed is not None, NORMS=y is not None, num_warps=4,
        )  # fmt: skip
    return out, mean, rstd
