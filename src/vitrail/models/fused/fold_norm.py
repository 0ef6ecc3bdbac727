"""Fold a layer norm's weight and bias into the linear layer after it.

W (n ∘ s + t) + b = (W diag s) n + (W t + b), for normalised tokens n, the norm's weight s and bias t. The weight is cast for the
matmul anyway, so folding costs next to nothing. The norm's backward pass then needs n only: it neither reads the residual again
nor sums two gradients over all tokens, for both follow from the weight's gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.launch import ceil_div, next_power_of_2, num_sms
from vitrail.models.fused.ops import op

_ROWS, _COLUMNS = 4, 256  # per tile of the backward pass


@triton.jit
def _fold_norm_kernel(
    weight, bias, norm_weight, norm_bias, folded, folded_bias, rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    row_mask, column_mask = row < rows, column < WIDTH
    mask, offset = row_mask[:, None] & column_mask[None, :], row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    w = tl.load(weight + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(norm_weight + column, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(folded + offset, (w * scale[None, :]).to(folded.dtype.element_ty), mask=mask)
    total = tl.sum(w * tl.load(norm_bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :], axis=1)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(folded_bias + row, total, mask=row_mask)


@triton.jit
def _unfold_norm_kernel(
    dfolded, dbias, weight, norm_weight, norm_bias, dweight, sums, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column, program = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    column_mask = column < width
    scale = tl.load(norm_weight + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(norm_bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    sum_scale = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum_shift = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & column_mask[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        grad = tl.load(dfolded + offset, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + offset, mask=mask, other=0.0).to(tl.float32)
        grad_bias = tl.load(dbias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        tl.store(dweight + offset, (grad * scale + grad_bias * shift).to(dweight.dtype.element_ty), mask=mask)
        sum_scale += grad * w
        sum_shift += grad_bias * w
    target = sums + program * 2 * width + column
    tl.store(target, tl.sum(sum_scale, axis=0), mask=column_mask)
    tl.store(target + width, tl.sum(sum_shift, axis=0), mask=column_mask)


def _empty_folded(
    weight: Tensor, bias: Tensor | None, norm_weight: Tensor, norm_bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    folded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    return folded, torch.empty(len(weight), dtype=torch.float32, device=weight.device)


@op(
    "fold_norm(Tensor weight, Tensor? bias, Tensor norm_weight, Tensor norm_bias, ScalarType dtype) -> (Tensor, Tensor)",
    _empty_folded,
)
def _fold(weight: Tensor, bias: Tensor | None, norm_weight: Tensor, norm_bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    folded, folded_bias = _empty_folded(weight, bias, norm_weight, norm_bias, dtype)
    rows, width = weight.shape
    padded = next_power_of_2(width)
    tile_rows = max(1, 4096 // padded)
    _fold_norm_kernel[(ceil_div(rows, tile_rows),)](
        weight.contiguous(), bias, norm_weight, norm_bias, folded, folded_bias, rows,
        WIDTH=width, PADDED=padded, ROWS=tile_rows, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return folded, folded_bias


def _empty_unfolded(
    dfolded: Tensor, dbias: Tensor, weight: Tensor, norm_weight: Tensor, norm_bias: Tensor
) -> tuple[Tensor, Tensor]:
    dweight = torch.empty(dfolded.shape, dtype=dfolded.dtype, device=dfolded.device)
    return dweight, torch.empty(2, weight.shape[1], dtype=norm_weight.dtype, device=weight.device)


@op(
    "unfold_norm(Tensor dfolded, Tensor dbias, Tensor weight, Tensor norm_weight, Tensor norm_bias) -> (Tensor, Tensor)",
    _empty_unfolded,
)
def _unfold(dfolded: Tensor, dbias: Tensor, weight: Tensor, norm_weight: Tensor, norm_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight's gradient, and those of the norm's weight and bias as two rows."""
    rows, width = weight.shape
    column_tiles = ceil_div(width, _COLUMNS)
    programs = max(1, min(ceil_div(rows, _ROWS), num_sms(weight.device) * 8 // column_tiles))
    dweight = torch.empty(dfolded.shape, dtype=dfolded.dtype, device=dfolded.device)
    sums = torch.empty(programs, 2, width, dtype=torch.float32, device=weight.device)
    _unfold_norm_kernel[(column_tiles, programs)](
        dfolded.contiguous(), dbias, weight.contiguous(), norm_weight, norm_bias, dweight, sums, rows, width,
        ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return dweight, column_sum(sums, norm_weight.dtype)


def fold_norm(
    weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the weight [out, in] to multiply normalised tokens with, in `dtype`, and the bias to add, in float32.

    A norm without weight and bias leaves nothing to fold: the weight is cast, and the bias is returned as it is.
    """
    if norm_weight is None or norm_bias is None:
        return weight.to(dtype), bias
    return _fold(weight, bias, norm_weight, norm_bias, dtype)


def unfold_norm(
    dfolded: Tensor, dbias: Tensor | None, weight: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the weight and of the norm's weight and bias, from those of what `fold_norm` returned."""
    if norm_weight is None or norm_bias is None:
        return dfolded, None, None
    assert dbias is not None
    dweight, dnorm = _unfold(dfolded, dbias, weight, norm_weight, norm_bias)
    dnorm_weight, dnorm_bias = dnorm.unbind(0)
    return dweight, dnorm_weight, dnorm_bias
