"""The MLP's first product with bias and GELU in its end, on Hopper GPUs and later.

Two programs share a multiprocessor: while one computes GELU the other keeps the tensor cores busy, which is what makes this
faster than the library's product and a pass after it. What enters GELU is never written. For a gradient its derivative is,
which is all that the backward pass (`back_gelu.py`) needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.models.fused.launching import ceil_div, is_fake, processors


class Tile(NamedTuple):
    """What a program computes at once."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 4
    stages: int = 3


@triton.jit
def tile_at(tile, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First row and column of a tile. They are numbered so that neighbours share what they read."""
    TALL: tl.constexpr = 8
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    top = tile // (TALL * across) * TALL
    height = min(down - top, TALL)
    return (top + tile % (TALL * across) % height) * ROWS, tile % (TALL * across) // height * COLUMNS


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile, so that less is held at once."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _finish(product, slope, out, bias, row, column, TANH: tl.constexpr, SLOPES: tl.constexpr, HALF: tl.constexpr):
    """Write GELU and, if wanted, its derivative.

    Φ(x), by which GELU multiplies x, is a logistic function of a polynomial, whose derivative is `steep`. The tanh form is exactly
    that. For the erf form four coefficients of either were fitted for least error: below 2e-5 for GELU, below 5e-5 for its
    derivative. Beyond 5 they are not followed further.
    """
    x = product + tl.load(bias + column + tl.arange(0, HALF)).to(tl.float32)[None, :]
    square = x * x
    if TANH:
        inner = x * (-2.302208198 + square * -0.10294324)
        steep = 1.595769122 + square * 0.2140644488
    else:
        square = tl.minimum(square, 25.0)
        inner = x * (-2.30164078 + square * (-0.105990105 + square * (7.38113483e-04 + square * 2.46914566e-05)))
        steep = 1.59521493 + square * (0.220498993 + square * (-2.54096609e-03 + square * -1.26102324e-04))
    root = tl.rsqrt(1.0 + tl.exp2(inner))
    chance = root * root  # one instruction less than a division
    value = x * chance
    out.store([row, column], value.to(out.dtype))
    if SLOPES:
        slope.store([row, column], (chance + value * steep * (1.0 - chance)).to(slope.dtype))


@triton.jit
def _up_gelu_kernel(
    tokens, weight, slope, out, bias, rows, columns, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, TANH: tl.constexpr, SLOPES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = COLUMNS // 2
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS), PROGRAMS, flatten=True):
        row, column = tile_at(tile, rows, columns, ROWS, COLUMNS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, inner, INNER):
            total = tl.dot(tokens.load([row, k]), weight.load([column, k]).T, total)
        left, right = halves(total, ROWS, COLUMNS)
        _finish(left, slope, out, bias, row, column, TANH, SLOPES, HALF)
        _finish(right, slope, out, bias, row, column + HALF, TANH, SLOPES, HALF)


def up_gelu(y: Tensor, weight: Tensor, bias: Tensor, tanh: bool, *, slope: Tensor | None = None) -> Tensor:
    """GELU(y Wᵀ + b), rounded once; its derivative is written to `slope`, if given. Has no gradient."""
    out = torch.empty(*y.shape[:-1], len(weight), dtype=y.dtype, device=y.device)
    if is_fake(y):
        return out
    rows, inner = y.numel() // y.shape[-1], y.shape[-1]
    tile = _tile_for(y, len(weight))
    written = (tile.rows, tile.columns // 2)
    matrices = (
        (y.reshape(rows, inner), tile.rows, tile.inner),
        (weight, tile.columns, tile.inner),
        ((out if slope is None else slope).view(rows, len(weight)), *written),
        (out.view(rows, len(weight)), *written),
    )
    programs = min(2 * processors(y.device), ceil_div(rows, tile.rows) * ceil_div(len(weight), tile.columns))
    _up_gelu_kernel[(programs,)](
        *(TensorDescriptor.from_tensor(matrix, [height, width]) for matrix, height, width in matrices),
        bias, rows, len(weight), inner,
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, TANH=tanh, SLOPES=slope is not None, PROGRAMS=programs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _tile_for(y: Tensor, width: int) -> Tile:
    """The large tile where all multiprocessors get several of it, else a smaller one: for an image or two."""
    large = Tile()
    tiles = ceil_div(y.numel() // y.shape[-1], large.rows) * ceil_div(width, large.columns)
    return large if tiles >= 4 * processors(y.device) else Tile(rows=64, inner=128)
