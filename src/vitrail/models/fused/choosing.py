"""Whether a product is better done by our own kernels or by the library: asked before each, answered by shape and by a trial."""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.checking import fault, largest_difference, log
from vitrail.models.fused.launching import generation, is_fake, processors


def suits(x: Tensor, columns: int, end: Literal["bias", "gelu"]) -> bool:
    """Whether our own kernels are for x [..., inner] times a weight with so many columns, and right on this device.

    With GELU in the end they are faster than the library and a pass, but for two to four images, where there is little between
    them; with a bias where there are many rows. Without either the library is: its larger tiles need less power.
    """
    inner, rows = x.shape[-1], x.numel() // x.shape[-1]
    if x.dtype not in (torch.bfloat16, torch.float16) or columns % 128 or inner % 64 or rows < 64:
        return False
    if is_fake(x):  # a Hopper GPU is planned for
        return True
    enough = end == "gelu" or rows * columns >= 8 * 128 * 128 * processors(x.device)
    return x.is_cuda and enough and _works(x.device, x.dtype)


@functools.cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has what the kernels are made for, and they compute the right thing there."""
    if generation(device) != 9:
        return False
    reason = fault(device, 0.01, lambda: _difference(device, dtype))
    if reason:
        log.warning("Vitrail's own products are not used here (%s); going on with torch's, more slowly.", reason)
    return not reason


def _difference(device: torch.device, dtype: torch.dtype) -> float:
    """How far off products, GELU's value, derivative and gradient are, relative to their size.

    Each program gets several tiles, and those at the edge are not full; or there are so few rows that tiles are lower.
    """
    from vitrail.models.fused.back_gelu import back_gelu
    from vitrail.models.fused.product import product, up_gelu

    generator, sizes = torch.Generator(device).manual_seed(0), ((40_037, 192), (256, 192), (256,), (192, 256))
    y, up, bias, down = (torch.randn(size, device=device, generator=generator).to(dtype) / 4 for size in sizes)
    slope = y.new_empty(len(y), 256)
    found = [product(y, up, bias), up_gelu(y[:150], up, bias, False)]
    found += [up_gelu(y, up, bias, False), up_gelu(y, up, bias, False, slope=slope), slope, *back_gelu(y, down, slope)]
    entering = F.linear(y.float(), up.float(), bias.float()).requires_grad_()
    value = F.gelu(entering)
    (derivative,) = torch.autograd.grad(value.sum(), entering)
    gradient = (y.float() @ down.float()) * derivative
    expected = [entering, value[:150], value, value, derivative, gradient, gradient.sum(0)]
    return largest_difference(expected, found)
