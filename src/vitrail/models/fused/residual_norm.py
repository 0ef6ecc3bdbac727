"""Residual addition and layer norm in one pass over memory, forward and backward.

A branch's output, its bias and its stochastic depth are added to the residual, and the sum is normalised for the next branch. The
norm's weight and bias are folded into the linear layer after it (`fold_norm.py`). Backward reads what was written and not the
residual: one pass gives the residual's gradient, the branch's gradient in low precision and its bias gradient. Sums over rows stay
in registers, in a fixed order: results are the same in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.dropout import dropout_scale
from vitrail.models.fused.launch import next_power_of_2, num_sms
from vitrail.models.fused.ops import once_differentiable, op


@triton.jit
def _norm_forward_kernel(
    x, branch, bias, drop_path_scale, seed, x_out, y, rstd_out, mean_in, mean_out,
    tokens, eps, rate,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROP_PATH: tl.constexpr,
    DROPS: tl.constexpr, NORMS: tl.constexpr, HAS_MEAN: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, PADDED)
    mask = column < WIDTH
    offset = row.to(tl.int64) * WIDTH + column
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(branch + offset, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            added += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_DROP_PATH:
            added *= tl.load(drop_path_scale + row // tokens)
        if DROPS:
            added *= dropout_scale(seed, offset, rate)
        value += added
        if NORMS:
            tl.store(x_out + offset, value.to(x_out.dtype.element_ty), mask=mask)
    mean = tl.sum(value) / WIDTH
    centred = tl.where(mask, value - mean, 0.0)
    if not NORMS:
        stored = centred.to(x_out.dtype.element_ty)
        tl.store(x_out + offset, stored, mask=mask)
        centred = stored.to(tl.float32)  # the deviation of what a matmul will read
        if HAS_MEAN:
            mean += tl.load(mean_in + row)
        tl.store(mean_out + row, mean)
    rstd = tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    if NORMS:
        tl.store(y + offset, (centred * rstd).to(y.dtype.element_ty), mask=mask)
    tl.store(rstd_out + row, rstd)


@triton.jit
def _norm_backward_kernel(
    dy, dx_next, y, rstd_in, drop_path_scale, seed, dx, dbranch, sums,
    rows, tokens, rate,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, HAS_DROP_PATH: tl.constexpr, HAS_NEXT: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    program, column = tl.program_id(0), tl.arange(0, PADDED)
    mask = column < WIDTH
    sum_bias = tl.zeros([PADDED], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * WIDTH + column
        grad = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(y + offset, mask=mask, other=0.0).to(tl.float32)
        projection = tl.sum(grad * normed) / WIDTH
        grad_mean = tl.sum(grad) / WIDTH
        result = (grad - normed * projection - grad_mean) * tl.load(rstd_in + row)
        if HAS_NEXT:
            result += tl.load(dx_next + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=mask)
        if ADDS:
            if HAS_DROP_PATH:
                result *= tl.load(drop_path_scale + row // tokens)
            if DROPS:
                result *= dropout_scale(seed, offset, rate)
            tl.store(dbranch + offset, result.to(dbranch.dtype.element_ty), mask=mask)
            sum_bias += result
    if ADDS:
        tl.store(sums + program * WIDTH + column, sum_bias, mask=mask)


def _empty(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None, rate: float,
    eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return _empty_sum(x, branch), y, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)


def _empty_sum(x: Tensor, branch: Tensor | None) -> Tensor:
    return torch.empty(0 if branch is None else x.shape, dtype=x.dtype, device=x.device)


@op(
    "residual_norm(Tensor x, Tensor? branch, Tensor? bias, Tensor? drop_path_scale, Tensor? seed, float rate, float eps,"
    " ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _empty,
)
def _residual_norm(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None, rate: float,
    eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum (empty without a branch), the normalised sum, and one over each row's standard deviation."""
    total, y, rstd = _empty(x, branch, bias, drop_path_scale, seed, rate, eps, dtype)
    _launch_forward(x, branch, bias, drop_path_scale, seed, rate, eps, total, y, rstd, None, None)
    return total, y, rstd


def _empty_centred(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None, rate: float,
    eps: float, mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rstd, new_mean = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rstd, new_mean


@op(
    "residual_centred(Tensor x, Tensor? branch, Tensor? bias, Tensor? drop_path_scale, Tensor? seed, float rate, float eps,"
    " Tensor? mean) -> (Tensor, Tensor, Tensor)",
    _empty_centred,
)
def residual_centred(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None, rate: float,
    eps: float, mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return x + drop_path_scale · dropout(branch + bias) with each row's mean subtracted, its rstd, and its mean.

    Not differentiable. rstd is that of the rows as stored. `mean` [image, token] is what was subtracted from x before; the new one
    includes it. Both are float32.
    """
    total, rstd, new_mean = _empty_centred(x, branch, bias, drop_path_scale, seed, rate, eps, mean)
    _launch_forward(x, branch, bias, drop_path_scale, seed, rate, eps, total, None, rstd, mean, new_mean)
    return total, rstd, new_mean


def _launch_forward(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None, rate: float,
    eps: float, total: Tensor, y: Tensor | None, rstd: Tensor, mean: Tensor | None, new_mean: Tensor | None,
) -> None:  # fmt: skip
    width = x.shape[-1]
    _norm_forward_kernel[(rstd.numel(),)](
        x.contiguous(), None if branch is None else branch.contiguous(), bias, drop_path_scale, seed, total, y, rstd,
        None if mean is None else mean.contiguous(), new_mean, x.shape[1], eps, rate,
        WIDTH=width, PADDED=next_power_of_2(width), ADDS=branch is not None, HAS_BIAS=bias is not None,
        HAS_DROP_PATH=drop_path_scale is not None, DROPS=seed is not None, NORMS=y is not None, HAS_MEAN=mean is not None,
        num_warps=4,
    )  # fmt: skip


def _empty_backward(
    y: Tensor, rstd: Tensor, dy: Tensor, dx_next: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None, rate: float,
    x_dtype: torch.dtype, branch_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty(y.shape, dtype=x_dtype, device=y.device)
    dbranch = torch.empty(0 if branch_dtype is None else y.shape, dtype=branch_dtype or y.dtype, device=y.device)
    return dx, dbranch, torch.empty(0 if bias_dtype is None else y.shape[-1], dtype=bias_dtype or y.dtype, device=y.device)


@op(
    "residual_norm_backward(Tensor y, Tensor rstd, Tensor dy, Tensor? dx_next, Tensor? drop_path_scale, Tensor? seed, float rate,"
    " ScalarType x_dtype, ScalarType? branch_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)",
    _empty_backward,
)
def _residual_norm_backward(
    y: Tensor, rstd: Tensor, dy: Tensor, dx_next: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None, rate: float,
    x_dtype: torch.dtype, branch_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, branch and bias; empty for those without a precision."""
    width, rows, adds = y.shape[-1], len(rstd), branch_dtype is not None
    dx = torch.empty(y.shape, dtype=x_dtype, device=y.device)
    dbranch = torch.empty(y.shape if adds else 0, dtype=branch_dtype or y.dtype, device=y.device)
    padded = next_power_of_2(width)
    programs = min(rows, num_sms(y.device) * (16 if padded <= 512 else 8))
    sums = torch.empty(programs, width, dtype=torch.float32, device=y.device) if adds else None
    _norm_backward_kernel[(programs,)](
        dy.contiguous(), None if dx_next is None else dx_next.contiguous(), y, rstd, drop_path_scale, seed, dx, dbranch, sums,
        rows, y.shape[1], rate,
        WIDTH=width, PADDED=padded, ADDS=adds, HAS_DROP_PATH=drop_path_scale is not None, HAS_NEXT=dx_next is not None,
        DROPS=seed is not None, num_warps=max(1, min(8, padded // 256)),
    )  # fmt: skip
    if sums is None or bias_dtype is None:
        return dx, dbranch, torch.empty(0, dtype=bias_dtype or y.dtype, device=y.device)
    return dx, dbranch, column_sum(sums, bias_dtype)


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None,
        rate: float, eps: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, y, rstd = _residual_norm(x, branch, bias, drop_path_scale, seed, rate, eps, dtype)
        ctx.save_for_backward(y, rstd, drop_path_scale, seed)
        ctx.rate, ctx.dtypes = rate, (x.dtype, None if branch is None else branch.dtype, None if bias is None else bias.dtype)
        ctx.set_materialize_grads(False)
        # x is returned, too, so that its gradient from later uses is added in the backward kernel, without another pass.
        return x.view_as(x) if branch is None else total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_next: Tensor | None, dy: Tensor | None) -> Any:
        y, rstd, drop_path_scale, seed = ctx.saved_tensors
        dy = torch.zeros_like(y) if dy is None else dy
        dx, dbranch, dbias = _residual_norm_backward(y, rstd, dy, dx_next, drop_path_scale, seed, ctx.rate, *ctx.dtypes)
        _, has_branch, has_bias = (one is not None for one in ctx.dtypes)
        return dx, dbranch if has_branch else None, dbias if has_branch and has_bias else None, None, None, None, None, None


def residual_norm(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, drop_path_scale: Tensor | None, seed: Tensor | None, rate: float,
    eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x + drop_path_scale · dropout(branch + bias), and its rows with mean 0 and standard deviation 1, in `dtype`.

    Without a branch x is only normalised, and returned as it is. `drop_path_scale` [image] holds stochastic depth's factors, `seed`
    that of a dropout with `rate`; either may be None.
    """
    # A module's numbers may be numpy's or tensors of one value, which Triton does not take.
    return _ResidualNorm.apply(x, branch, bias, drop_path_scale, seed, float(rate), float(eps), dtype)  # type: ignore[no-any-return]
