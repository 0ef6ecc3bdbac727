"""Add prefix tokens and position embeddings to the patch embeddings (equation 1) in one pass, in the residual's precision.

Backward, one pass writes the patches' gradient in their own precision and sums over images for the tokens all images share.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import ceil_div, next_power_of_2
from vitrail.models.fused.ops import once_differentiable, op

_IMAGES, _COLUMNS = 16, 128  # per tile of the backward pass


@triton.jit
def _prefix_positions_forward_kernel(patches, fixed, out, tokens, prefix, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    image, token = row // tokens, row % tokens
    mask = column < WIDTH
    value = tl.load(fixed + token * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    offset = (image * (tokens - prefix) + token - prefix) * WIDTH + column
    columns = tl.where(token >= prefix, WIDTH, 0)  # prefix tokens have no patch
    value += tl.load(patches + offset, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _prefix_positions_backward_kernel(
    dout, dpatches, dfixed, images, tokens, prefix, WIDTH: tl.constexpr, IMAGES: tl.constexpr, COLUMNS: tl.constexpr
):
    token, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = (column < WIDTH)[None, :]
    patch_mask = (column < tl.where(token >= prefix, WIDTH, 0))[None, :]
    total = tl.zeros([IMAGES, COLUMNS], tl.float32)
    for start in range(0, images, IMAGES):
        image = (start + tl.arange(0, IMAGES)).to(tl.int64)[:, None]
        mask = image < images
        grad = tl.load(dout + (image * tokens + token) * WIDTH + column[None, :], mask=mask & column_mask, other=0.0)
        grad = grad.to(tl.float32)
        offset = (image * (tokens - prefix) + token - prefix) * WIDTH + column[None, :]
        tl.store(dpatches + offset, grad.to(dpatches.dtype.element_ty), mask=mask & patch_mask)
        total += grad
    tl.store(dfixed + token * WIDTH + column, tl.sum(total, axis=0).to(dfixed.dtype.element_ty), mask=column < WIDTH)


def _empty(patches: Tensor, fixed: Tensor) -> Tensor:
    dtype = torch.promote_types(patches.dtype, fixed.dtype)
    return torch.empty(len(patches), *fixed.shape, dtype=dtype, device=patches.device)


@op("add_prefix_and_positions(Tensor patches, Tensor fixed) -> Tensor", _empty)
def _forward(patches: Tensor, fixed: Tensor) -> Tensor:
    out, tokens, width = _empty(patches, fixed), *fixed.shape
    _prefix_positions_forward_kernel[(len(patches) * tokens,)](
        patches.contiguous(), fixed.contiguous(), out, tokens, tokens - patches.shape[1],
        WIDTH=width, PADDED=next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


def _empty_grads(dout: Tensor, prefix: int, patches: torch.dtype, fixed: torch.dtype) -> tuple[Tensor, Tensor]:
    images, tokens, width = dout.shape
    dpatches = torch.empty(images, tokens - prefix, width, dtype=patches, device=dout.device)
    return dpatches, torch.empty(tokens, width, dtype=fixed, device=dout.device)


@op(
    "add_prefix_and_positions_backward(Tensor dout, int prefix, ScalarType patches, ScalarType fixed) -> (Tensor, Tensor)",
    _empty_grads,
)
def _backward(dout: Tensor, prefix: int, patches: torch.dtype, fixed: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gradients of the patches and of `fixed`, in the given precisions."""
    images, tokens, width = dout.shape
    dpatches, dfixed = _empty_grads(dout, prefix, patches, fixed)
    _prefix_positions_backward_kernel[(tokens, ceil_div(width, _COLUMNS))](
        dout.contiguous(), dpatches, dfixed, images, tokens, prefix,
        WIDTH=width, IMAGES=_IMAGES, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return dpatches, dfixed


class _PrefixPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, patches: Tensor, fixed: Tensor) -> Tensor:
        ctx.prefix, ctx.dtypes = len(fixed) - patches.shape[1], (patches.dtype, fixed.dtype)
        return _forward(patches, fixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(dout, ctx.prefix, *ctx.dtypes)


def add_prefix_and_positions(patches: Tensor, fixed: Tensor) -> Tensor:
    """Add patches [image, patch, width] to the last tokens of `fixed` ([token, width] or [1, token, width]), for each image.

    `fixed` holds what all images share: prefix tokens and position embeddings.
    """
    return _PrefixPositions.apply(patches, fixed.flatten(0, -2))  # type: ignore[no-any-return]
