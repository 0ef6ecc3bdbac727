"""Images cut into patches in the precision of the product that follows, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import is_fake, next_power_of_2


@triton.jit
def _patchify_kernel(
    images, patches,
    channels, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDED_HEIGHT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One channel of a row of patches."""
    image, channel, row, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    line, column = tl.arange(0, PADDED_HEIGHT)[:, None], tl.arange(0, PADDED)[None, :]
    inside = (line < HEIGHT) & (column < width)
    at = ((image * channels + channel) * rows + row) * HEIGHT * width
    value = tl.load(images + at + line * width + column, mask=inside, other=0.0)
    patch = (image * rows + row) * (width // WIDTH) + column // WIDTH
    place = (patch * channels + channel) * HEIGHT * WIDTH + line * WIDTH + column % WIDTH
    tl.store(patches + place, value.to(patches.dtype.element_ty), mask=inside)


def patchify(images: Tensor, patch: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Images [image, channel, row, column] as patches, row by row: [image, patch, channel · row · column]. Has no gradient."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch[0], width // patch[1]
    patches = torch.empty(batch, rows * columns, channels * patch[0] * patch[1], dtype=dtype, device=images.device)
    tile = next_power_of_2(patch[0]), next_power_of_2(width)
    if not is_fake(images):
        _patchify_kernel[(batch, channels, rows)](
            images.contiguous(), patches, channels, width,
            HEIGHT=patch[0], WIDTH=patch[1], PADDED_HEIGHT=tile[0], PADDED=tile[1],
            num_warps=min(16, max(4, tile[0] * tile[1] // 1024)),
        )  # fmt: skip
    return patches
