"""Cross-entropy over rows of low-precision logits, without ever writing them out in float32.

For sixteen predictions of 512 classes a patch the logits are the largest tensor of a step; torch would write them in float32 some
seven times over.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.launch import ceil_div, has_triton, next_power_of_2
from vitrail.models.fused.self_test import works

_MOST = 8192  # values a program holds
_LOW = (torch.bfloat16, torch.float16)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(logits)[target] of every row [row, class], in float32."""
    ours = logits.is_cuda and logits.dtype in _LOW and logits.shape[1] <= _MOST and has_triton()
    if ours and not torch.compiler.is_compiling() and works(logits.device, logits.dtype):
        return CrossEntropy.apply(logits.contiguous(), targets)  # type: ignore[no-any-return]
    return F.cross_entropy(logits.float(), targets, reduction="none")


class CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they came and one number a row; the gradient is made from these in one pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        from vitrail.models.fused.cross_entropy_kernels import forward_kernel

        rows, classes = logits.shape
        losses, lse = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
        padded, at_once = _shape(classes)
        forward_kernel[(ceil_div(rows, at_once),)](
            logits, targets, losses, lse, rows, CLASSES=classes, PADDED=padded, ROWS=at_once, num_warps=4
        )
        ctx.save_for_backward(logits, targets, lse)
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        from vitrail.models.fused.cross_entropy_kernels import backward_kernel

        logits, targets, lse = ctx.saved_tensors
        rows, classes = logits.shape
        gradient = torch.empty_like(logits)
        padded, at_once = _shape(classes)
        backward_kernel[(ceil_div(rows, at_once),)](
            logits, targets, lse, slopes.contiguous(), gradient, rows,
            CLASSES=classes, PADDED=padded, ROWS=at_once, num_warps=4,
        )  # fmt: skip
        return gradient, None


def _shape(classes: int) -> tuple[int, int]:
    """The padded width of a row, and how many rows a program takes: together about as much as its registers like."""
    padded = next_power_of_2(classes)
    return padded, max(1, 2048 // padded)
