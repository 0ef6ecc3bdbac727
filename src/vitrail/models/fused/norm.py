"""Residual addition and layer norm in one pass over memory, forward and backward.

A branch's output, its bias and its stochastic depth are added to the residual stream, and the sum is normalised for the next.
The backward pass gives the stream's gradient, the branch's gradient in low precision, and the gradients of the branch's bias and
of the norm's weights, all from reading everything once. Sums over rows are kept in registers, in a fixed order: results are
the same from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.dropout import kept
from vitrail.models.fused.launching import is_fake, next_power_of_2, processors
from vitrail.models.fused.sums import added_up


@triton.jit
def _forward_kernel(
    x, branch, bias, keep, seed, weight, shift, x_out, y, mean_out, rstd_out,
    tokens, eps, rate,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    DROPS: tl.constexpr,
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
        tl.store(x_out + place, value.to(x_out.dtype.element_ty), mask=inside)
    mean = tl.sum(value) / WIDTH
    centred = tl.where(inside, value - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, (centred * rstd * scale + offset).to(y.dtype.element_ty), mask=inside)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)


@triton.jit
def _backward_kernel(
    dy, dx_next, x, mean_in, rstd_in, weight, keep, seed, dx, dbranch, sums,
    rows, tokens, rate,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_NEXT: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    program, column = tl.program_id(0), tl.arange(0, PADDED)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros([PADDED], tl.float32)
    sum_shift = tl.zeros([PADDED], tl.float32)
    sum_bias = tl.zeros([PADDED], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * WIDTH + column
        slope = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_in + row)
        normed = tl.where(inside, (value - tl.load(mean_in + row)) * rstd, 0.0)
        sum_weight += slope * normed
        sum_shift += slope
        slope *= scale
        along = tl.sum(slope * normed) / WIDTH
        level = tl.sum(slope) / WIDTH
        result = (slope - normed * along - level) * rstd
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
    target = sums + program * 3 * WIDTH + column
    tl.store(target, sum_weight, mask=inside)
    tl.store(target + WIDTH, sum_shift, mask=inside)
    tl.store(target + 2 * WIDTH, sum_bias, mask=inside)


class AddNorm(torch.autograd.Function):
    """(x, branch, bias, …, weight, shift) → (x + keep · dropout(branch + bias), its layer norm in low precision).

    `branch` may be None: then x is only normalised. `keep` is stochastic depth's factor for each image, or None. `seed` is that
    of a dropout with `rate`, or None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, keep: Tensor | None, seed: Tensor | None,
        rate: float, weight: Tensor, shift: Tensor, eps: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        width, rows = x.shape[-1], x.numel() // x.shape[-1]
        x = x.contiguous()
        out = x.view_as(x) if branch is None else torch.empty_like(x)
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        mean, rstd = torch.empty(2, rows, dtype=torch.float32, device=x.device)
        if not is_fake(x):
            _forward_kernel[(rows,)](
                x, branch, bias, keep, seed, weight, shift, out, y, mean, rstd, x.shape[1], eps, rate,
                WIDTH=width, PADDED=next_power_of_2(width),
                ADDS=branch is not None, HAS_BIAS=bias is not None, HAS_KEEP=keep is not None,
                DROPS=seed is not None, num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(out, mean, rstd, weight, keep, seed)
        ctx.rate, ctx.branch, ctx.dtype, ctx.has_bias = rate, None if branch is None else branch.dtype, dtype, bias is not None
        ctx.set_materialize_grads(False)
        return out, y

    @staticmethod
    def backward(ctx: Any, dx_next: Tensor | None, dy: Tensor | None) -> Any:
        x, mean, rstd, weight, keep, seed = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros_like(x, dtype=ctx.dtype)
        width, rows = x.shape[-1], len(mean)
        dx = torch.empty_like(x)
        adds = ctx.branch is not None
        dbranch = torch.empty(x.shape, dtype=ctx.branch, device=x.device) if adds else None
        padded = next_power_of_2(width)
        programs = min(rows, processors(x.device) * (16 if padded <= 512 else 8))
        sums = torch.empty(programs, 3, width, dtype=torch.float32, device=x.device)
        dx_next = None if dx_next is None else dx_next.contiguous()
        if not is_fake(x):
            _backward_kernel[(programs,)](
                dy.contiguous(), dx_next, x, mean, rstd, weight, keep, seed, dx, dbranch, sums,
                rows, x.shape[1], ctx.rate,
                WIDTH=width, PADDED=padded,
                ADDS=adds, HAS_KEEP=keep is not None, HAS_NEXT=dx_next is not None, DROPS=seed is not None,
                num_warps=max(1, min(8, padded // 512)),
            )  # fmt: skip
        dweight, dshift, dbias = added_up(sums, weight.dtype)
        return dx, dbranch, dbias if adds and ctx.has_bias else None, None, None, None, dweight, dshift, None, None


def normed(x: Tensor, weight: Tensor, shift: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The norm alone, without gradients: what `AddNorm` gave, again."""
    with torch.no_grad():
        return AddNorm.apply(x, None, None, None, None, 0.0, weight, shift, eps, dtype)[1]  # type: ignore[no-any-return]
