"""The kernels of `cross_entropy`: a program takes a few whole rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import ceil_div, next_power_of_2
from vitrail.models.fused.ops import op


@triton.jit
def _cross_entropy_forward_kernel(
    logits, targets, losses, lse_out, rows, CLASSES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    mask = row < rows
    target = tl.load(targets + row, mask=mask, other=0)
    offset = row.to(tl.int64)[:, None] * CLASSES + column[None, :]
    value = tl.load(logits + offset, mask=mask[:, None] & (column < CLASSES)[None, :], other=float("-inf")).to(tl.float32)
    top = tl.max(value, axis=1)
    top = tl.where(mask, top, 0.0)  # rows beyond the last hold nothing but −∞
    lse = top + tl.log(tl.sum(tl.exp(value - top[:, None]), axis=1))
    target_logit = tl.sum(tl.where(column[None, :] == target[:, None], value, 0.0), axis=1)
    tl.store(losses + row, lse - target_logit, mask=mask)
    tl.store(lse_out + row, lse, mask=mask)


@triton.jit
def _cross_entropy_backward_kernel(
    logits, targets, lse_in, dlosses, dlogits, rows, CLASSES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    row_mask = row < rows
    mask = row_mask[:, None] & (column < CLASSES)[None, :]
    target = tl.load(targets + row, mask=row_mask, other=0)
    lse = tl.load(lse_in + row, mask=row_mask, other=0.0)
    grad = tl.load(dlosses + row, mask=row_mask, other=0.0)
    offset = row.to(tl.int64)[:, None] * CLASSES + column[None, :]
    value = tl.load(logits + offset, mask=mask, other=float("-inf")).to(tl.float32)
    probability = tl.exp(value - lse[:, None])
    result = (probability - tl.where(column[None, :] == target[:, None], 1.0, 0.0)) * grad[:, None]
    tl.store(dlogits + offset, result.to(dlogits.dtype.element_ty), mask=mask)


def _empty(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses, lse = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    return losses, lse


@op("cross_entropy(Tensor logits, Tensor targets) -> (Tensor, Tensor)", _empty)
def cross_entropy_forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss and the logarithm of its softmax denominator, in float32."""
    (rows, classes), (losses, lse) = logits.shape, _empty(logits, targets)
    padded, tile_rows = _tile(classes)
    _cross_entropy_forward_kernel[(ceil_div(rows, tile_rows),)](
        logits.contiguous(), targets.contiguous(), losses, lse, rows,
        CLASSES=classes, PADDED=padded, ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    return losses, lse


def _empty_backward(logits: Tensor, targets: Tensor, lse: Tensor, dlosses: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@op("cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor dlosses) -> Tensor", _empty_backward)
def cross_entropy_backward(logits: Tensor, targets: Tensor, lse: Tensor, dlosses: Tensor) -> Tensor:
    """Return the gradient of the logits, in their precision."""
    (rows, classes), dlogits = logits.shape, _empty_backward(logits, targets, lse, dlosses)
    padded, tile_rows = _tile(classes)
    _cross_entropy_backward_kernel[(ceil_div(rows, tile_rows),)](
        logits.contiguous(), targets.contiguous(), lse, dlosses.contiguous(), dlogits, rows,
        CLASSES=classes, PADDED=padded, ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    return dlogits


def _tile(classes: int) -> tuple[int, int]:
    """Return a row's padded width, and how many rows make a program's registers about full."""
    padded = next_power_of_2(classes)
    return padded, max(1, 2048 // padded)
