"""Image operations on a batch, each image with parameters of its own, on any device.

Images are uint8 [n, channels, height, width]. Arithmetic follows torchvision's tensor operations (or, where a function
is told `reference`, TensorFlow's) including whether a fraction is rounded or cut off. Nothing here reads a value back
from the device, so a GPU never waits.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_LUMA = (0.2989, 0.587, 0.114)


def affine(images: Tensor, matrices: Tensor, fill: int) -> Tensor:
    """Move pixels by matrices [n, 2, 3] (result → source, from the middle), nearest neighbour; outside becomes `fill`."""
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
    moved = images.reshape(n, channels, -1).gather(2, source.expand(-1, channels, -1)).view(images.shape)
    return moved.masked_fill_(outside[:, None], fill)


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Each pixel value replaced by what a table says: tables uint8 [n, 256], or [n, channels, 256]."""
    n, channels = images.shape[:2]
    if images.device.type == "cpu" and tables.dim() == 2:  # numpy needs no index of eight bytes for every pixel
        looked_up = [np.take(table, image) for table, image in zip(tables.numpy(), images.numpy(), strict=True)]
        return torch.from_numpy(np.stack(looked_up))
    tables = tables if tables.dim() == 3 else tables[:, None].expand(-1, channels, -1)
    return tables.gather(2, images.reshape(n, channels, -1).long()).view(images.shape)


def saturate(images: Tensor, factors: Tensor, *, reference: bool = False) -> Tensor:
    """RandAugment's Color: away from (or towards) the grey image. Leaves anything but three channels alone."""
    return _blend(images, _grey(images, reference), factors) if images.shape[1] == 3 else images


def contrast(images: Tensor, factors: Tensor, *, reference: bool = False) -> Tensor:
    """Away from (or towards) the mean grey of the image."""
    grey = _grey(images, reference) if images.shape[1] == 3 else images.float().mean(1, keepdim=True)
    mean = grey.mean((1, 2, 3), keepdim=True)
    return _blend(images, mean.floor() if reference else mean, factors)


def sharpen(images: Tensor, factors: Tensor, *, reference: bool = False) -> Tensor:
    """Away from (or towards) a smoothed image; the outermost pixels stay."""
    if min(images.shape[2:]) < 3:
        return images
    pixels = images.float()
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    smooth = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    # Sums of whole numbers are exact, so a flat 200 stays 200.
    smooth = smooth.add_(pixels[:, :, 1:-1, 1:-1], alpha=4).div_(13)
    smooth = smooth.floor_() if reference else smooth.round_()
    dull = pixels.clone()
    dull[:, :, 1:-1, 1:-1] = smooth
    return _blend(images, dull, factors)


def autocontrast(images: Tensor) -> Tensor:
    """Each channel stretched so that its darkest value is 0 and its brightest 255."""
    pixels = images.float()
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    flat = high == low
    scale = ((high - low) * (1 / 255)).masked_fill_(flat, 1.0)
    return ((pixels - low.masked_fill(flat, 0.0)) / scale).clamp_(0, 255).to(torch.uint8)


def equalize(images: Tensor) -> Tensor:
    """Each channel's values spread so that all are about equally frequent, by Pillow's integer rule."""
    n, channels, height, width = images.shape
    flat = images.reshape(n, channels, -1).long()
    # One long histogram for all: in one dimension torch can count even where only deterministic algorithms are allowed.
    bins = (flat + 256 * torch.arange(n * channels, device=images.device).view(n, channels, 1)).view(-1)
    counts = torch.zeros(n * channels * 256, dtype=torch.int32, device=images.device)
    counts = counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32)).view(n, channels, 256)
    sums = counts.cumsum(2, dtype=torch.int64)
    brightest = counts.gather(2, flat.amax(2, keepdim=True))
    step = (height * width - brightest) // 255
    tables = (sums + step // 2) // step.clamp(min=1)
    tables = F.pad(tables[..., :-1], (1, 0)).clamp_(0, 255).to(torch.uint8)
    return torch.where(step[..., None] == 0, images, look_up(images, tables))


def cut_out(images: Tensor, centres: Tensor, half: int, fill: int) -> Tensor:
    """A square of side 2 · half around each (row, column) painted over."""
    y = torch.arange(images.shape[2], device=images.device)[None, :, None]
    x = torch.arange(images.shape[3], device=images.device)[None, None, :]
    row, column = centres[:, 0, None, None], centres[:, 1, None, None]
    inside = (y >= row - half) & (y < row + half) & (x >= column - half) & (x < column + half)
    return images.masked_fill(inside[:, None], fill)


def _grey(images: Tensor, reference: bool) -> Tensor:
    red, green, blue = images.float().unbind(1)
    grey = (red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2])[:, None]
    # TensorFlow goes through [0, 1] and back with a factor of 255.5, which nearly rounds.
    return (grey * (255.5 / 255)).floor_() if reference else grey.floor_()


def _blend(images: Tensor, dull: Tensor, factors: Tensor) -> Tensor:
    share = factors[:, None, None, None]
    # Fractions are cut off. The small step up keeps a result that is whole, such as 0.1 · 50 + 0.9 · 20, from falling by
    # one through rounding errors (as it does, here and there, in torchvision).
    return (images * share + dull * (1 - share)).add_(1e-4).clamp_(0, 255).to(torch.uint8)
