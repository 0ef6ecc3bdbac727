"""Split images into flattened patches and round them to the matmul's precision, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import next_power_of_2
from vitrail.models.fused.ops import op


@triton.jit
def _patchify_kernel(
    images, patches,
    channels, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDED_HEIGHT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Copy one channel of one row of patches."""
    image, channel, row, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    line, column = tl.arange(0, PADDED_HEIGHT)[:, None], tl.arange(0, PADDED)[None, :]
    mask = (line < HEIGHT) & (column < width)
    start = ((image * channels + channel) * rows + row) * HEIGHT * width
    value = tl.load(images + start + line * width + column, mask=mask, other=0.0)
    patch = (image * rows + row) * (width // WIDTH) + column // WIDTH
    offset = (patch * channels + channel) * HEIGHT * WIDTH + line * WIDTH + column % WIDTH
    tl.store(patches + offset, value.to(patches.dtype.element_ty), mask=mask)


def _empty(images: Tensor, patch: Sequence[int], dtype: torch.dtype) -> Tensor:
    batch, channels, height, width = images.shape
    count = (height // patch[0]) * (width // patch[1])
    return torch.empty(batch, count, channels * patch[0] * patch[1], dtype=dtype, device=images.device)


@op("patchify(Tensor images, int[] patch, ScalarType dtype) -> Tensor", _empty)
def patchify(images: Tensor, patch: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return images [image, channel, row, column] as patches [image, patch, channel · row · column]. Not differentiable."""
    batch, channels, height, width = images.shape
    patches = _empty(images, patch, dtype)
    tile = next_power_of_2(patch[0]), next_power_of_2(width)
    _patchify_kernel[(batch, channels, height // patch[0])](
        images.contiguous(), patches, channels, width,
        HEIGHT=patch[0], WIDTH=patch[1], PADDED_HEIGHT=tile[0], PADDED=tile[1],
        num_warps=min(16, max(4, tile[0] * tile[1] // 1024)),
    )  # fmt: skip
    return patches
