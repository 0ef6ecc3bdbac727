"""Image operations on a batch, with parameters per image, on any device.

Images are uint8 [n, channels, height, width]. Arithmetic follows torchvision's tensor operations (or TensorFlow's, with
`tensorflow=True`), including whether a fraction is rounded or truncated. Nothing here synchronises with the device.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_LUMA = (0.2989, 0.587, 0.114)


def affine(images: Tensor, matrices: Tensor, fill: int) -> Tensor:
    """Warp by matrices [n, 2, 3] (output → input coordinates, origin at the centre), nearest neighbour, padded with `fill`."""
    n, channels, height, width = images.shape
    y = torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    columns, rows = (
        (
            matrices[:, k, 0, None, None] * x
            + matrices[:, k, 1, None, None] * y[:, None]
            + matrices[:, k, 2, None, None]
            + (side - 1) / 2
        ).round_()
        for k, side in ((0, width), (1, height))
    )
    outside = (columns < 0) | (columns > width - 1) | (rows < 0) | (rows > height - 1)
    source = (rows.clamp_(0, height - 1) * width + columns.clamp_(0, width - 1)).long().view(n, 1, -1)
    warped = images.reshape(n, channels, -1).gather(2, source.expand(-1, channels, -1)).view(images.shape)
    return warped.masked_fill_(outside[:, None], fill)


def apply_lookup(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each pixel value by its entry in a table: tables uint8 [n, 256], or [n, channels, 256]."""
    n, channels = images.shape[:2]
    if images.device.type == "cpu" and tables.dim() == 2:  # numpy indexes by uint8; torch would need an int64 index per pixel
        looked_up = [np.take(table, image) for table, image in zip(tables.numpy(), images.numpy(), strict=True)]
        return torch.from_numpy(np.stack(looked_up))
    tables = tables if tables.dim() == 3 else tables[:, None].expand(-1, channels, -1)
    return tables.gather(2, images.reshape(n, channels, -1).long()).view(images.shape)


def adjust_saturation(images: Tensor, factors: Tensor, *, tensorflow: bool = False) -> Tensor:
    """Blend with the grey image (RandAugment's Color). Images without three channels are unchanged."""
    return _blend(images, _grey(images, tensorflow), factors) if images.shape[1] == 3 else images


def adjust_contrast(images: Tensor, factors: Tensor, *, tensorflow: bool = False) -> Tensor:
    """Blend with the mean grey of the image."""
    grey = _grey(images, tensorflow) if images.shape[1] == 3 else images.float().mean(1, keepdim=True)
    mean = grey.mean((1, 2, 3), keepdim=True)
    return _blend(images, mean.floor() if tensorflow else mean, factors)


def adjust_sharpness(images: Tensor, factors: Tensor, *, tensorflow: bool = False) -> Tensor:
    """Blend with a smoothed image; the outermost pixels are unchanged."""
    if min(images.shape[2:]) < 3:
        return images
    pixels = images.float()
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    smooth = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    # Sums of integers are exact, so a constant 200 stays 200.
    smooth = smooth.add_(pixels[:, :, 1:-1, 1:-1], alpha=4).div_(13)
    smooth = smooth.floor_() if tensorflow else smooth.round_()
    degenerate = pixels.clone()
    degenerate[:, :, 1:-1, 1:-1] = smooth
    return _blend(images, degenerate, factors)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel so that its smallest value is 0 and its largest 255."""
    pixels = images.float()
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    flat = high == low
    scale = ((high - low) * (1 / 255)).masked_fill_(flat, 1.0)
    return ((pixels - low.masked_fill(flat, 0.0)) / scale).clamp_(0, 255).to(torch.uint8)


def equalize(images: Tensor) -> Tensor:
    """Equalise the histogram of each channel, with Pillow's integer arithmetic."""
    n, channels, height, width = images.shape
    flat = images.reshape(n, channels, -1).long()
    # One flat histogram for all channels: scatter_add_ has a deterministic CUDA kernel only in one dimension.
    bins = (flat + 256 * torch.arange(n * channels, device=images.device).view(n, channels, 1)).view(-1)
    counts = torch.zeros(n * channels * 256, dtype=torch.int32, device=images.device)
    counts = counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32)).view(n, channels, 256)
    sums = counts.cumsum(2, dtype=torch.int64)
    last_bin = counts.gather(2, flat.amax(2, keepdim=True))
    step = (height * width - last_bin) // 255
    tables = (sums + step // 2) // step.clamp(min=1)
    tables = F.pad(tables[..., :-1], (1, 0)).clamp_(0, 255).to(torch.uint8)
    return torch.where(step[..., None] == 0, images, apply_lookup(images, tables))


def cutout(images: Tensor, centres: Tensor, half: int, fill: int) -> Tensor:
    """Fill a square of side 2 · half around each centre (row, column)."""
    y = torch.arange(images.shape[2], device=images.device)[None, :, None]
    x = torch.arange(images.shape[3], device=images.device)[None, None, :]
    row, column = centres[:, 0, None, None], centres[:, 1, None, None]
    inside = (y >= row - half) & (y < row + half) & (x >= column - half) & (x < column + half)
    return images.masked_fill(inside[:, None], fill)


def _grey(images: Tensor, tensorflow: bool) -> Tensor:
    red, green, blue = images.float().unbind(1)
    grey = (red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2])[:, None]
    # TensorFlow converts to [0, 1] and back with a factor of 255.5, which nearly rounds.
    return (grey * (255.5 / 255)).floor_() if tensorflow else grey.floor_()


def _blend(images: Tensor, degenerate: Tensor, factors: Tensor) -> Tensor:
    factors = factors[:, None, None, None]
    # Fractions are truncated. The offset keeps a result that is an integer, such as 0.1 · 50 + 0.9 · 20, from becoming one
    # less through rounding errors (as sometimes happens in torchvision).
    return (images * factors + degenerate * (1 - factors)).add_(1e-4).clamp_(0, 255).to(torch.uint8)
