"""Cross-entropy over rows of low-precision logits, without writing them in float32.

With sixteen predictions of 512 classes per patch the logits are the largest tensor of a step; torch would write them in float32
about seven times.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.launch import has_triton
from vitrail.models.fused.ops import once_differentiable
from vitrail.models.fused.self_test import works_on

_MAX_CLASSES = 8192  # a program holds a whole row
_LOW = (torch.bfloat16, torch.float16)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return −log softmax(logits)[target] of every row [row, class], in float32."""
    if _fuses(logits):
        return CrossEntropy.apply(logits, targets)  # type: ignore[no-any-return]
    return F.cross_entropy(logits.float(), targets, reduction="none")


def _fuses(logits: Tensor) -> bool:
    if not logits.is_cuda or logits.dtype not in _LOW or not 0 < logits.shape[1] <= _MAX_CLASSES or not has_triton():
        return False
    from vitrail.models.fused.ordinary_call import is_ordinary_call
    from vitrail.models.fused.whitelist import is_plain_tensor

    return is_plain_tensor(logits) and is_ordinary_call() and works_on(logits.device, logits.dtype)


class CrossEntropy(torch.autograd.Function):
    """Save the logits as they are and one number per row; one pass makes the gradient from them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        from vitrail.models.fused.cross_entropy_kernels import cross_entropy_forward

        losses, lse = cross_entropy_forward(logits, targets)
        ctx.save_for_backward(logits, targets, lse)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None]:
        from vitrail.models.fused.cross_entropy_kernels import cross_entropy_backward

        logits, targets, lse = ctx.saved_tensors
        return cross_entropy_backward(logits, targets, lse, dlosses), None
