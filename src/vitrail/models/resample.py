"""Carry a table of positions to another grid, by the rule of the code base that its weights come from.

Resampling is linear, and one axis does not depend on the other. So it is a product with one small matrix per axis. The matrices
are all that is kept from call to call. They depend on sizes alone, never on the table: a table that was trained, loaded or edited
since the last call cannot be mixed up with what it was before. Being a product, it also has a gradient, runs on the table's own
device, and can be compiled and captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.models.config import Pair, PositionRule

# How each code base resamples its table: torch's mode, align_corners, antialias. The reference calls scipy's zoom of order 1,
# which is bilinear with aligned corners.
RULES: dict[PositionRule, tuple[str, bool, bool]] = {
    "reference": ("bilinear", True, False),
    "timm": ("bicubic", False, True),
    "hf": ("bicubic", False, False),
    "torchvision": ("bicubic", True, False),
}


def resize_grid(table: Tensor, size: Pair, rule: PositionRule = "reference") -> Tensor:
    """Resample a table [layer, row, column, channel] to another number of rows and columns by a named rule.

    Differentiable. Computed in float64, so that the result depends neither on the device nor on rounded coordinates.
    """
    if rule not in RULES:
        raise VitrailError(f"There is no position rule {rule!r}; known are {', '.join(RULES)}.")
    if min(size) < 1:
        raise VitrailError(f"A grid of {size[0]}×{size[1]} has no positions; both sides must be at least 1.")
    layers, rows, columns, channels = table.shape
    if (rows, columns) == tuple(size):
        return table.clone()
    device = torch.device("cpu") if table.device.type == "mps" else table.device  # Apple's GPUs have no float64
    values = table.to(device, torch.float64).reshape(layers, rows, columns * channels)
    values = _matrix(rows, size[0], rule, device) @ values
    values = _matrix(columns, size[1], rule, device) @ values.reshape(layers * size[0], columns, channels)
    return values.reshape(layers, *size, channels).to(table.device, table.dtype)


def sincos_table(grid: Pair, width: int) -> Tensor:
    """big_vision's fixed table [position, width]: sine and cosine of x, then of y, at frequencies from 1 down to 1/10000."""
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    frequencies = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4 - 1))
    angles_x, angles_y = (axis.flatten()[:, None] * frequencies[None, :] for axis in (x, y))
    return torch.cat([angles_x.sin(), angles_x.cos(), angles_y.sin(), angles_y.cos()], dim=1).float()


def sincos_on(grid: Pair, width: int, device: torch.device) -> Tensor:
    """Return that table on a device, to read only: it is kept."""
    return _constant(_sincos, grid, width, device)


def _matrix(old: int, new: int, rule: PositionRule, device: torch.device) -> Tensor:
    """Return [new, old]: the weight of each old position in each new one."""
    return _constant(_interpolation, old, new, rule, device)


def _constant(make: Callable[..., Tensor], *given: Any) -> Tensor:
    """Return `make(*given)`, kept from an earlier call where tensors made now are plain: not fake, traced, or a transform's."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return make(*given)
    from vitrail.models.fused.ordinary_call import is_eager_call

    if not is_eager_call():
        return make(*given)
    made = _kept(make, *given)
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _CAPTURED[make, *given] = made  # a CUDA graph reads this memory as long as it is replayed
    return made


@functools.lru_cache(256)
@torch.inference_mode(False)  # tensors made in inference mode could not be used in training later
@torch.no_grad()
def _kept(make: Callable[..., Tensor], *given: Any) -> Tensor:
    return make(*given)


_CAPTURED: dict[tuple[Any, ...], Tensor] = {}


def _interpolation(old: int, new: int, rule: PositionRule, device: torch.device) -> Tensor:
    mode, align, antialias = RULES[rule]
    # Along the width: torch's antialiased kernel misreads images that are one column wide.
    identity = torch.eye(old, dtype=torch.float64, device="cpu")[None, :, None]  # [1, channel, 1 row, column]
    made = F.interpolate(identity, size=(1, new), mode=mode, align_corners=align, antialias=antialias)
    return made[0, :, 0].T.contiguous().to(device)


def _sincos(grid: Pair, width: int, device: torch.device) -> Tensor:
    with torch.device("cpu"):
        return sincos_table(grid, width).to(device)
