"""Grey, blur and hue on a batch, with parameters per image, in Pillow's arithmetic.

Images are uint8 [n, channels, height, width]. Nothing here synchronises with the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment.batch_ops import grey_image


def grayscale(images: Tensor) -> Tensor:
    """Replace the three channels by their grey. Images without three channels are unchanged."""
    return grey_image(images, "pillow").to(torch.uint8).expand_as(images) if images.shape[1] == 3 else images


def gaussian_blur(images: Tensor, sigmas: Tensor) -> Tensor:
    """Blur with a standard deviation of at most 2 pixels, as Pillow: three box filters in each direction; edges are repeated."""
    variance = sigmas.square() / 3  # of each of the three boxes
    whole = (((12 * variance + 1).sqrt() - 1) / 2).floor()
    fraction = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1).square()))
    radius = whole + fraction
    reach = 2  # a variance of up to 4/3 has a radius below 2
    offsets = torch.arange(-reach, reach + 1, device=images.device).abs()
    weights = (radius[:, None] + 1 - offsets).clamp(0, 1) / (2 * radius[:, None] + 1)
    pixels = images.float()
    for dim in (3, 2):
        length = images.shape[dim]
        for _ in range(3):
            padded = F.pad(pixels, (reach, reach, 0, 0) if dim == 3 else (0, 0, reach, reach), mode="replicate")
            pixels = torch.zeros_like(pixels)
            for k in range(2 * reach + 1):
                pixels.addcmul_(padded.narrow(dim, k, length), weights[:, k, None, None, None])
            pixels = (pixels + 0.5).floor_()  # Pillow stores 8 bits after each filter
    return pixels.clamp_(0, 255).to(torch.uint8)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the hue by a part of the colour circle, from −0.5 to 0.5. Images without three channels are unchanged.

    Hue and saturation are rounded down to 8 bits, so that even a shift of 0 changes images a little, as in Pillow.
    """
    if images.shape[1] != 3:
        return images
    hue, saturation, value = _hsv(images.float())
    # torchvision truncates towards zero, and lets 8 bits overflow.
    hue = torch.remainder(hue + (shifts * 255).trunc()[:, None, None], 256)
    return _rgb(hue, saturation, value)


def _hsv(pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue, saturation and value [n, H, W] as whole numbers from 0 to 255."""
    red, green, blue = pixels.unbind(1)
    value, low = pixels.amax(1), pixels.amin(1)
    spread = value - low
    grey = spread == 0
    spread = spread.masked_fill(grey, 1.0)
    from_red, from_green, from_blue = ((value - channel) / spread for channel in (red, green, blue))
    sixths = torch.where(
        red == value,
        from_blue - from_green,
        torch.where(green == value, 2 + from_red - from_blue, 4 + from_green - from_red),
    )
    # The offsets keep whole numbers from becoming one less through rounding errors.
    hue = (torch.remainder(sixths / 6 + 1, 1.0) * 255 + 1e-4).floor_()
    saturation = (spread / value.clamp(min=1) * 255 + 1e-4).floor_()
    return hue.masked_fill_(grey, 0), saturation.masked_fill_(grey, 0), value


def _rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Convert whole numbers from 0 to 255 back to uint8 RGB [n, 3, H, W]."""
    sixths, part = hue * 6 / 255, saturation / 255
    channels = []
    for offset in (5, 3, 1):  # each channel is at its full value over a third of the circle, at its lowest over another
        position = torch.remainder(sixths + offset, 6)
        below = torch.minimum(position, 4 - position).clamp_(0, 1)
        channels.append((value * (1 - part * below) + 0.5).floor_())
    return torch.stack(channels, 1).to(torch.uint8)
