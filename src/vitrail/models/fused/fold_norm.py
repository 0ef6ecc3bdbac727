"""A layer norm's weights taken into the product that follows it, so that what the norm writes is all that is kept of it.

W (n ∘ s + t) + b = (W diag s) n + (W t + b), for normed tokens n, the norm's weight s and shift t. The weight is cast for the
product anyway, so this costs next to nothing; and the norm's backward pass, which needs n and nothing else, neither reads the
residual stream again nor adds up two gradients over all tokens: both follow from the weight's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.launch import ceil_div, is_fake, next_power_of_2, num_sms

_ROWS, _COLUMNS = 4, 256  # that a program of the backward pass takes at once


@triton.jit
def _fold_kernel(
    weight, bias, scale, shift, folded, offset, rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    there, inside = row < rows, column < WIDTH
    mask, place = there[:, None] & inside[None, :], row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(folded + place, (value * factor[None, :]).to(folded.dtype.element_ty), mask=mask)
    total = tl.sum(value * tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)[None, :], axis=1)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(offset + row, total, mask=there)


@triton.jit
def _unfold_kernel(dfolded, doffset, weight, scale, shift, dweight, sums, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column, program = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    inside = column < width
    factor = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    added = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sum_scale = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum_shift = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        slope = tl.load(dfolded + place, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        lift = tl.load(doffset + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        tl.store(dweight + place, (slope * factor + lift * added).to(dweight.dtype.element_ty), mask=mask)
        sum_scale += slope * value
        sum_shift += lift * value
    target = sums + program * 2 * width + column
    tl.store(target, tl.sum(sum_scale, axis=0), mask=inside)
    tl.store(target + width, tl.sum(sum_shift, axis=0), mask=inside)


def fold_norm(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The weight [row, column] to multiply normed tokens by, in the given precision, and what to add then, in float32.

    Without a scale there is nothing to fold: they come back as they are, the weight cast.
    """
    if scale is None or shift is None:
        return weight.to(dtype), bias
    weight, width = weight.contiguous(), weight.shape[1]
    folded = torch.empty_like(weight, dtype=dtype)
    offset = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    padded = next_power_of_2(width)
    at_once = max(1, 4096 // padded)
    if not is_fake(weight):
        _fold_kernel[(ceil_div(len(weight), at_once),)](
            weight, bias, scale, shift, folded, offset, len(weight),
            WIDTH=width, PADDED=padded, ROWS=at_once, HAS_BIAS=bias is not None, num_warps=4,
        )  # fmt: skip
    return folded, offset


def unfold_norm(
    dfolded: Tensor, doffset: Tensor | None, weight: Tensor, scale: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the weight, the scale and the shift from those of what `fold` gave; `dfolded` is overwritten."""
    if scale is None or shift is None:
        return dfolded, None, None
    weight, (rows, width) = weight.contiguous(), weight.shape
    across = ceil_div(width, _COLUMNS)
    programs = max(1, min(ceil_div(rows, _ROWS), num_sms(weight.device) * 8 // across))
    sums = torch.empty(programs, 2, width, dtype=torch.float32, device=weight.device)
    if not is_fake(weight):
        _unfold_kernel[(across, programs)](
            dfolded, doffset, weight, scale, shift, dfolded, sums, rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
        )
    dscale, dshift = column_sum(sums, scale.dtype)
    return dfolded, dscale, dshift
