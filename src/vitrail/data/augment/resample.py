"""Crop, flip and resize a batch in two batched matmuls, with a box per image.

A resize is linear and separable: rows × image × columns. With one small matrix per image and direction that holds the
filter weights (antialiased as in Pillow and torch), two `bmm` crop, flip and resize the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.augment.spec import CropInterpolation


def crop_resize(
    images: Tensor,
    boxes: Tensor,
    flips: Tensor,
    size: tuple[int, int],
    *,
    interpolation: CropInterpolation = "bilinear",
    antialias: bool = True,
) -> Tensor:
    """Crop uint8 [n, H, W, C] to boxes [n, 4] (top, left, height, width), flip where `flips`, resize to uint8 [n, C, *size]."""
    n, height, width, channels = images.shape
    # fp16 represents every pixel value exactly, its error is at most a quarter of a level, and it uses tensor cores.
    dtype = torch.float16 if images.is_cuda else torch.float32
    top, left, box_h, box_w = boxes.float().unbind(1)
    rows = filter_weights(top, box_h, height, size[0], interpolation, antialias)
    columns = filter_weights(left, box_w, width, size[1], interpolation, antialias)
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    resized_rows = torch.bmm(rows.to(dtype), images.to(dtype).view(n, height, width * channels))
    planes = resized_rows.view(n, size[0], width, channels).permute(0, 3, 1, 2).reshape(n, channels * size[0], width)
    result = torch.bmm(planes, columns.to(dtype).transpose(1, 2)).view(n, channels, *size)
    return result.round_().clamp_(0, 255).to(torch.uint8)


def filter_weights(
    start: Tensor, length: Tensor, source: int, target: int, interpolation: CropInterpolation, antialias: bool
) -> Tensor:
    """Return [n, target, source]: the weight of each source pixel in each pixel of the resized range [start, start + length)."""
    scale = (length / target)[:, None, None]
    filter_scale = scale.clamp(min=1.0) if antialias else torch.ones_like(scale)
    centres = (torch.arange(target, device=start.device) + 0.5)[None, :, None] * scale
    pixels = torch.arange(source, device=start.device)[None, None, :] + 0.5 - start[:, None, None]
    if not antialias:  # beyond the outermost pixel centres the edge is repeated
        centres = centres.clamp(min=0.5).minimum(length[:, None, None] - 0.5)
    distance = ((pixels - centres) / filter_scale).abs()
    weights = (1 - distance).clamp_(min=0.0) if interpolation == "bilinear" else _cubic(distance)
    weights = weights * ((pixels > 0) & (pixels < length[:, None, None]))
    return weights / weights.sum(2, keepdim=True)


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic kernel with a = −1/2, as in Pillow's and torch's antialiased bicubic."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(distance)))
