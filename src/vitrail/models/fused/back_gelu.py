"""The gradient at what enters GELU: the product with the MLP's second weight, times the derivative that `up_gelu` kept.

In the end of the product, with the sums for the first bias, it costs a few multiplications; a pass of its own would read and
write the widest tensors of a block once more.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.models.fused.checking import largest_difference
from vitrail.models.fused.launching import ceil_div, generation, is_fake, processors
from vitrail.models.fused.sums import added_up
from vitrail.models.fused.up_gelu import Tile, halves, tile_at, up_gelu

_TILE = Tile()


@triton.jit
def _finish(product, slope, dhidden, sums, row, column, HALF: tl.constexpr):
    value = product * slope.to(tl.float32)
    dhidden.store([row, column], value.to(dhidden.dtype))
    tl.store(sums + column + tl.arange(0, HALF), tl.sum(value, axis=0))


@triton.jit
def _back_gelu_kernel(
    dbranch, weight, slope, dhidden, sums, rows, columns, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = COLUMNS // 2
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS), PROGRAMS):
        row, column = tile_at(tile, rows, columns, ROWS, COLUMNS)
        # Asked for before the product, so that it is there after it.
        place = row + tl.arange(0, ROWS)
        at = slope + place.to(tl.int64)[:, None] * columns + column + tl.arange(0, HALF)[None, :]
        real = (place < rows)[:, None]
        left_slope = tl.load(at, mask=real, other=0.0)
        right_slope = tl.load(at + HALF, mask=real, other=0.0)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, inner, INNER):
            total = tl.dot(dbranch.load([row, k]), weight.load([k, column]), total)
        left, right = halves(total, ROWS, COLUMNS)
        found = sums + (row // ROWS).to(tl.int64) * columns
        _finish(left, left_slope, dhidden, found, row, column, HALF)
        _finish(right, right_slope, dhidden, found, row, column + HALF, HALF)


def back_gelu(dbranch: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """(dbranch W) ∘ slope in the slope's precision, and its sum over rows in float32."""
    dhidden = torch.empty_like(slope)
    rows, (inner, columns) = dbranch.numel() // len(weight), weight.shape
    down, across = ceil_div(rows, _TILE.rows), ceil_div(columns, _TILE.columns)
    sums = torch.empty(down, columns, dtype=torch.float32, device=slope.device)
    if not is_fake(dbranch):
        programs = min(2 * processors(slope.device), down * across)
        matrices = (
            (dbranch.reshape(rows, inner), _TILE.rows, _TILE.inner),
            (weight, _TILE.inner, _TILE.columns),
            (dhidden.view(rows, columns), _TILE.rows, _TILE.columns // 2),
        )
        left, right, out = (TensorDescriptor.from_tensor(matrix, [height, width]) for matrix, height, width in matrices)
        _back_gelu_kernel[(programs,)](
            left, right, slope, out, sums, rows, columns, inner,
            ROWS=_TILE.rows, COLUMNS=_TILE.columns, INNER=_TILE.inner, PROGRAMS=programs,
            num_warps=_TILE.warps, num_stages=_TILE.stages,
        )  # fmt: skip
    return dhidden, added_up(sums, torch.float32)


def suits(y: Tensor, width: int) -> bool:
    """Whether both products with GELU run here, and have something to do for all multiprocessors; else the library is better."""
    columns, inner = _TILE.columns, _TILE.inner
    if y.dtype != torch.bfloat16 or width % columns or y.shape[-1] % inner or y.numel() // y.shape[-1] < inner:
        return False
    return is_fake(y) or (y.is_cuda and _works(y.device))


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether the device has what the kernels are made for, and they compute the right thing there."""
    if generation(device) < 9:
        return False
    try:
        with torch.no_grad():
            return max(_difference(device, rows) for rows in (300, 50_000)) < 0.01  # a size for either tile
    except Exception:  # whatever a compiler or a driver may say; the other way is there
        return False


def _difference(device: torch.device, rows: int) -> float:
    """How far off value, derivative and gradient are, relative to their size."""
    generator, sizes = torch.Generator(device).manual_seed(0), ((rows, 64), (256, 64), (256,), (64, 256))
    y, up, bias, down = (torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) for size in sizes)
    slope = y.new_empty(rows, 256)
    found = [up_gelu(y, up, bias, False), up_gelu(y, up, bias, False, slope=slope), slope]
    found += back_gelu(y, down, slope)
    with torch.autocast(device.type, enabled=False), torch.enable_grad():
        entering = (F.linear(y.float(), up.float()) + bias).requires_grad_()
        value = F.gelu(entering)
        (derivative,) = torch.autograd.grad(value.sum(), entering)
        gradient = (y.float() @ down.float()) * derivative
    expected = [value.detach()] * 2 + [derivative, gradient, gradient.sum(0)]
    return largest_difference(expected, found)
