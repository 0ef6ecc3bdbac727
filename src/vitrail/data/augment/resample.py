"""Crop, flip and resize a batch in two matrix products, every image with a box of its own.

A resize is linear and separable: rows × image × columns. With one small matrix an image for each direction, holding the
filter's weights (antialiased as Pillow and torch do it), the whole batch is cut, mirrored and scaled by two `bmm`.
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
    """From uint8 [n, H, W, C] the boxes [n, 4] (top, left, height, width), mirrored where told, as uint8 [n, C, *size]."""
    n, height, width, channels = images.shape
    # Half precision holds every pixel value exactly and errs by at most a quarter of a level; it also uses tensor cores.
    dtype = torch.float16 if images.is_cuda else torch.float32
    top, left, tall, wide = boxes.float().unbind(1)
    rows = filter_weights(top, tall, height, size[0], interpolation, antialias)
    columns = filter_weights(left, wide, width, size[1], interpolation, antialias)
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    half_way = torch.bmm(rows.to(dtype), images.to(dtype).view(n, height, width * channels))
    planes = half_way.view(n, size[0], width, channels).permute(0, 3, 1, 2).reshape(n, channels * size[0], width)
    result = torch.bmm(planes, columns.to(dtype).transpose(1, 2)).view(n, channels, *size)
    return result.round_().clamp_(0, 255).to(torch.uint8)


def filter_weights(
    start: Tensor, length: Tensor, source: int, target: int, interpolation: CropInterpolation, antialias: bool
) -> Tensor:
    """[n, target, source]: how much each source pixel gives to each pixel of the part [start, start + length) resized."""
    scale = (length / target)[:, None, None]
    widening = scale.clamp(min=1.0) if antialias else torch.ones_like(scale)
    centres = (torch.arange(target, device=start.device) + 0.5)[None, :, None] * scale
    pixels = torch.arange(source, device=start.device)[None, None, :] + 0.5 - start[:, None, None]
    if not antialias:  # beyond the first and last pixel centre the edge is repeated, not faded
        centres = centres.clamp(min=0.5).minimum(length[:, None, None] - 0.5)
    distance = ((pixels - centres) / widening).abs()
    weights = (1 - distance).clamp_(min=0.0) if interpolation == "bilinear" else _cubic(distance)
    weights = weights * ((pixels > 0) & (pixels < length[:, None, None]))
    return weights / weights.sum(2, keepdim=True)


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic with a = −1/2, as Pillow's and torch's antialiased bicubic."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(distance)))
