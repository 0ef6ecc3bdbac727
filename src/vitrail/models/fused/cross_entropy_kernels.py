"""The kernels of `cross_entropy`: a program takes a few whole rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(logits, targets, losses, lse_out, rows, CLASSES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    real = row < rows
    target = tl.load(targets + row, mask=real, other=0)
    place = row.to(tl.int64)[:, None] * CLASSES + column[None, :]
    value = tl.load(logits + place, mask=real[:, None] & (column < CLASSES)[None, :], other=float("-inf")).to(tl.float32)
    top = tl.max(value, axis=1)
    top = tl.where(real, top, 0.0)  # rows beyond the end hold nothing but −∞
    lse = top + tl.log(tl.sum(tl.exp(value - top[:, None]), axis=1))
    own = tl.sum(tl.where(column[None, :] == target[:, None], value, 0.0), axis=1)
    tl.store(losses + row, lse - own, mask=real)
    tl.store(lse_out + row, lse, mask=real)


@triton.jit
def backward_kernel(
    logits, targets, lse_in, slopes, gradient, rows, CLASSES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    real = row < rows
    mask = real[:, None] & (column < CLASSES)[None, :]
    target = tl.load(targets + row, mask=real, other=0)
    lse = tl.load(lse_in + row, mask=real, other=0.0)
    slope = tl.load(slopes + row, mask=real, other=0.0)
    place = row.to(tl.int64)[:, None] * CLASSES + column[None, :]
    value = tl.load(logits + place, mask=mask, other=float("-inf")).to(tl.float32)
    share = tl.exp(value - lse[:, None])
    result = (share - tl.where(column[None, :] == target[:, None], 1.0, 0.0)) * slope[:, None]
    tl.store(gradient + place, result.to(gradient.dtype.element_ty), mask=mask)
