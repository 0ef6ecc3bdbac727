"""Image operations on a batch, with parameters per image, on any device.

Images are uint8 [n, channels, height, width]. Libraries differ in rounding and in how they average colours, so operations
take the `Arithmetic` of torchvision's tensor operations, of TensorFlow's or of Pillow's. Nothing here synchronises with the
device.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.data.augment.operations import Arithmetic, WarpInterpolation
from vitrail.data.types import Array

_LUMA = (0.2989, 0.587, 0.114)


def affine(images: Tensor, matrices: Tensor, fill: tuple[int, ...], interpolation: WarpInterpolation = "nearest") -> Tensor:
    """Warp by matrices [n, 2, 3] (output → input coordinates, origin at the centre), and fill areas outside the image.

    Bilinear and bicubic interpolation is Pillow's: the cubic kernel has a = −1, and fractions are truncated.
    """
    n, channels, height, width = images.shape
    y = torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    columns, rows = (
        (
            matrices[:, k, 0, None, None] * x
            + matrices[:, k, 1, None, None] * y[:, None]
            + matrices[:, k, 2, None, None]
            + (side - 1) / 2
        )
        for k, side in ((0, width), (1, height))
    )
    flat = images.reshape(n, channels, -1)
    if interpolation == "nearest":
        columns, rows = columns.round_(), rows.round_()
        outside = (columns < 0) | (columns > width - 1) | (rows < 0) | (rows > height - 1)
        warped = _pixels_at(flat, columns, rows, (height, width)).view(images.shape)
    else:
        # A pixel is within the image up to its border, half a pixel from the outermost centres.
        outside = (columns < -0.5) | (columns >= width - 0.5) | (rows < -0.5) | (rows >= height - 0.5)
        warped = _interpolated(flat, columns, rows, (height, width), interpolation).view(images.shape)
    if len(set(fill)) == 1:
        return warped.masked_fill_(outside[:, None], fill[0])
    for channel, value in enumerate(fill):
        warped[:, channel].masked_fill_(outside, value)
    return warped


def affine_pillow(images: Tensor, matrices: Array, fill: tuple[int, ...], interpolation: WarpInterpolation) -> Tensor:
    """Warp grey or RGB images as `affine` with Pillow itself, which on a CPU takes half the time."""
    height, width = images.shape[2:]
    coefficients = matrices.copy()
    centre = np.array([width / 2, height / 2])  # Pillow's origin is the corner of the image
    coefficients[:, :, 2] += centre - coefficients[:, :, :2] @ centre
    coefficients = coefficients.round(9)  # a shift of exactly 0 stays 0, or Pillow would truncate 200 to 199
    colour = fill if len(fill) > 1 else fill[0]
    resample = Image.Resampling.BILINEAR if interpolation == "bilinear" else Image.Resampling.BICUBIC
    warped = [
        np.asarray(
            Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).transform(
                (width, height), Image.Transform.AFFINE, own.ravel().tolist(), resample=resample, fillcolor=colour
            )
        ).reshape(pixels.shape)
        for pixels, own in zip(images.permute(0, 2, 3, 1).contiguous().numpy(), coefficients, strict=True)
    ]
    return torch.from_numpy(np.stack(warped)).permute(0, 3, 1, 2)


def _interpolated(flat: Tensor, columns: Tensor, rows: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Return uint8 [n, C, H·W]: pixels of flattened images at fractional positions; the edge is repeated outwards."""
    weights = _linear_weights if interpolation == "bilinear" else _cubic_weights
    left, top = columns.floor(), rows.floor()
    in_row, in_column = weights(columns - left), weights(rows - top)
    first = 1 - len(in_row) // 2
    result = torch.zeros(flat.shape, dtype=torch.float32, device=flat.device)
    for dy, down in enumerate(in_column, first):
        line = torch.zeros_like(result)
        for dx, across in enumerate(in_row, first):
            line.addcmul_(_pixels_at(flat, left + dx, top + dy, size), across.flatten(1)[:, None])
        result.addcmul_(line, down.flatten(1)[:, None])
    # The offset keeps a constant 200 from becoming 199 through rounding errors.
    return result.add_(1e-3).clamp_(0, 255).to(torch.uint8)


def _pixels_at(flat: Tensor, columns: Tensor, rows: Tensor, size: tuple[int, int]) -> Tensor:
    """Return [n, C, H·W]: pixels of flattened images at integer positions, clamped to the image."""
    height, width = size
    source = (rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)).long().view(len(flat), 1, -1)
    return flat.gather(2, source.expand(-1, flat.shape[1], -1))


def _linear_weights(fraction: Tensor) -> tuple[Tensor, ...]:
    return 1 - fraction, fraction


def _cubic_weights(fraction: Tensor) -> tuple[Tensor, ...]:
    """Weights of the pixels at −1, 0, 1 and 2 for Keys' cubic kernel with a = −1."""
    t, u = fraction, 1 - fraction
    return -t * u * u, (t - 2) * t * t + 1, (u - 2) * u * u + 1, -u * t * t


def point_tables(parameters: Tensor) -> Tensor:
    """Return lookup tables uint8 [n, 256] of piecewise linear functions of the pixel value, from parameters [n, 6].

    They are: a threshold, factor and offset below it, factor and offset from it on, and the step that results are rounded
    down to.
    """
    threshold, low, low_offset, high, high_offset, step = parameters[:, :, None].unbind(1)
    values = torch.arange(256, device=parameters.device, dtype=torch.float32)
    values = torch.where(values < threshold, values * low + low_offset, values * high + high_offset)
    return (values.clamp_(0, 255) / step).floor_().mul_(step).to(torch.uint8)


def apply_lookup(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each pixel value by its entry in a table: tables uint8 [n, 256], or [n, channels, 256]."""
    n, channels = images.shape[:2]
    if images.device.type == "cpu" and tables.dim() == 2:  # numpy indexes by uint8; torch would need an int64 index per pixel
        looked_up = [np.take(table, image) for table, image in zip(tables.numpy(), images.numpy(), strict=True)]
        return torch.from_numpy(np.stack(looked_up))
    tables = tables if tables.dim() == 3 else tables[:, None].expand(-1, channels, -1)
    return tables.gather(2, images.reshape(n, channels, -1).long()).view(images.shape)


def adjust_saturation(images: Tensor, factors: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Blend with the grey image (RandAugment's Color). Images without three channels are unchanged."""
    return _blend(images, grey_image(images, arithmetic), factors, arithmetic) if images.shape[1] == 3 else images


def adjust_contrast(images: Tensor, factors: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Blend with the mean grey of the image."""
    grey = grey_image(images, arithmetic) if images.shape[1] == 3 else images.float().mean(1, keepdim=True)
    mean = grey.mean((1, 2, 3), keepdim=True)
    if arithmetic != "torchvision":
        mean = (mean + 0.5).floor_() if arithmetic == "pillow" else mean.floor()
    return _blend(images, mean, factors, arithmetic)


def adjust_sharpness(images: Tensor, factors: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Blend with a smoothed image; the outermost pixels are unchanged."""
    if min(images.shape[2:]) < 3:
        return images
    pixels = images.float()
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    smooth = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    # Sums of integers are exact, so a constant 200 stays 200.
    smooth = smooth.add_(pixels[:, :, 1:-1, 1:-1], alpha=4).div_(13)
    smooth = smooth.floor_() if arithmetic == "tensorflow" else smooth.round_()
    degenerate = pixels.clone()
    degenerate[:, :, 1:-1, 1:-1] = smooth
    return _blend(images, degenerate, factors, arithmetic)


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


def cutout(images: Tensor, centres: Tensor, half: Tensor, fill: tuple[int, ...]) -> Tensor:
    """Fill a square of side 2 · half around each centre (row, column), with the same value in all channels."""
    y = torch.arange(images.shape[2], device=images.device)[None, :, None]
    x = torch.arange(images.shape[3], device=images.device)[None, None, :]
    row, column, half = centres[:, 0, None, None], centres[:, 1, None, None], half[:, None, None]
    inside = (y >= row - half) & (y < row + half) & (x >= column - half) & (x < column + half)
    return images.masked_fill(inside[:, None], fill[0])


def grey_image(images: Tensor, arithmetic: Arithmetic) -> Tensor:
    red, green, blue = images.float().unbind(1)
    if arithmetic == "pillow":  # ITU-R 601 in 16-bit integers, which float32 represents exactly
        return ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor_()[:, None]
    grey = (red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2])[:, None]
    # TensorFlow converts to [0, 1] and back with a factor of 255.5, which nearly rounds.
    return (grey * (255.5 / 255)).floor_() if arithmetic == "tensorflow" else grey.floor_()


def _blend(images: Tensor, degenerate: Tensor, factors: Tensor, arithmetic: Arithmetic) -> Tensor:
    factors = factors[:, None, None, None]
    if arithmetic == "pillow":
        return ((images - degenerate) * factors + degenerate).clamp_(0, 255).to(torch.uint8)
    # Fractions are truncated. The offset keeps a result that is an integer, such as 0.1 · 50 + 0.9 · 20, from becoming one
    # less through rounding errors (as sometimes happens in torchvision).
    return (images * factors + degenerate * (1 - factors)).add_(1e-4).clamp_(0, 255).to(torch.uint8)
