"""The encoder's input in one pass: patch embeddings behind the prefix tokens, with their positions, in the stream's precision.

Backward, one pass gives the patches' gradient in their own precision and what all images together want of each token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import ceil_div, is_fake, next_power_of_2

_IMAGES, _COLUMNS = 16, 128  # that a program of the backward pass takes at once


@triton.jit
def _assemble_forward_kernel(patches, fixed, out, tokens, prefix, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    image, token = row // tokens, row % tokens
    inside = column < WIDTH
    value = tl.load(fixed + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    place = (image * (tokens - prefix) + token - prefix) * WIDTH + column
    columns = tl.where(token >= prefix, WIDTH, 0)  # of a patch; prefix tokens have none
    value += tl.load(patches + place, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _assemble_backward_kernel(
    dout, dpatches, dfixed, images, tokens, prefix, WIDTH: tl.constexpr, IMAGES: tl.constexpr, COLUMNS: tl.constexpr
):
    token, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < WIDTH)[None, :]
    of_patch = (column < tl.where(token >= prefix, WIDTH, 0))[None, :]
    total = tl.zeros([IMAGES, COLUMNS], tl.float32)
    for start in range(0, images, IMAGES):
        image = (start + tl.arange(0, IMAGES)).to(tl.int64)[:, None]
        there = image < images
        slope = tl.load(dout + (image * tokens + token) * WIDTH + column[None, :], mask=there & inside, other=0.0).to(tl.float32)
        place = (image * (tokens - prefix) + token - prefix) * WIDTH + column[None, :]
        tl.store(dpatches + place, slope.to(dpatches.dtype.element_ty), mask=there & of_patch)
        total += slope
    tl.store(dfixed + token * WIDTH + column, tl.sum(total, axis=0).to(dfixed.dtype.element_ty), mask=column < WIDTH)


class PrefixPositions(torch.autograd.Function):
    """(patches [image, patch, width], fixed [token, width]) → fixed, to whose last tokens each image's patches are added."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, fixed: Tensor) -> Tensor:
        images, count, width = patches.shape
        tokens = len(fixed)
        ctx.shape, ctx.dtypes = (images, count, tokens, width), (patches.dtype, fixed.dtype)
        out = torch.empty(images, tokens, width, dtype=torch.promote_types(patches.dtype, fixed.dtype), device=patches.device)
        if not is_fake(patches):
            _assemble_forward_kernel[(images * tokens,)](
                patches.contiguous(), fixed.contiguous(), out, tokens, tokens - count,
                WIDTH=width, PADDED=next_power_of_2(width), num_warps=4,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        images, count, tokens, width = ctx.shape
        dpatches = torch.empty(images, count, width, dtype=ctx.dtypes[0], device=dout.device)
        dfixed = torch.empty(tokens, width, dtype=ctx.dtypes[1], device=dout.device)
        if not is_fake(dout):
            _assemble_backward_kernel[(tokens, ceil_div(width, _COLUMNS))](
                dout.contiguous(), dpatches, dfixed, images, tokens, tokens - count,
                WIDTH=width, IMAGES=_IMAGES, COLUMNS=_COLUMNS, num_warps=4,
            )  # fmt: skip
        return dpatches, dfixed
