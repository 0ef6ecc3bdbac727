"""The MLP's first product with bias and GELU in its end, on Hopper GPUs and later.

Two programs share a multiprocessor: while one computes GELU the other keeps the tensor cores busy, which is what makes this
faster than the library's product and a pass after it. Without gradients nobody needs what enters GELU, and it is never written.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.models.fused.launching import ceil_div, processors


class Tile(NamedTuple):
    """What a program computes at once."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 4
    stages: int = 3


@triton.jit
def _chance(x, TANH: tl.constexpr):
    """Φ(x), by which GELU multiplies x, as a logistic function of a polynomial.

    The tanh form is exactly that. For the erf form five coefficients were fitted for least error of GELU, below 3e-5.
    Beyond 6 the polynomial is not followed further.
    """
    square = x * x
    if TANH:
        inner = x * (-2.302208198 + square * -0.10294324)
    else:
        square = tl.minimum(square, 36.0)
        higher = 6.14186324e-04 + square * (5.59615258e-05 + square * -1.93641048e-06)
        inner = x * (-2.30152210 + square * (-0.105932679 + square * higher))
    root = tl.rsqrt(1.0 + tl.exp2(inner))
    return root * root  # one instruction less than a division


@triton.jit
def _activated(product, bias, column, TANH: tl.constexpr, HALF: tl.constexpr):
    x = product + tl.load(bias + column + tl.arange(0, HALF)).to(tl.float32)[None, :]
    return x * _chance(x, TANH)


@triton.jit
def _kernel(
    tokens, weight, hidden, out, bias, rows, columns, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, TANH: tl.constexpr, KEEPS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    TALL: tl.constexpr = 8  # tiles: neighbours share what they read
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    HALF: tl.constexpr = COLUMNS // 2
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        top = tile // (TALL * across) * TALL
        height = min(down - top, TALL)
        row = (top + tile % (TALL * across) % height) * ROWS
        column = tile % (TALL * across) // height * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, inner, INNER):
            total = tl.dot(tokens.load([row, k]), weight.load([column, k]).T, total)
        # In two halves, so that less is held at once.
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1)))
        if KEEPS:
            hidden.store([row, column], left.to(out.dtype))
        out.store([row, column], _activated(left, bias, column, TANH, HALF).to(out.dtype))
        if KEEPS:
            hidden.store([row, column + HALF], right.to(out.dtype))
        out.store([row, column + HALF], _activated(right, bias, column + HALF, TANH, HALF).to(out.dtype))


def up_gelu(y: Tensor, weight: Tensor, bias: Tensor, tanh: bool, *, hidden: Tensor | None = None) -> Tensor:
    """GELU(y Wᵀ + b), rounded once; y Wᵀ is written to `hidden`, if given. Has no gradient."""
    rows, inner = y.numel() // y.shape[-1], y.shape[-1]
    tile = _tile_for(y, len(weight))
    out = torch.empty(*y.shape[:-1], len(weight), dtype=y.dtype, device=y.device)
    written = (tile.rows, tile.columns // 2)
    matrices = (
        (y.reshape(rows, inner), tile.rows, tile.inner),
        (weight, tile.columns, tile.inner),
        ((out if hidden is None else hidden).view(rows, len(weight)), *written),
        (out.view(rows, len(weight)), *written),
    )
    programs = min(2 * processors(y.device), ceil_div(rows, tile.rows) * ceil_div(len(weight), tile.columns))
    _kernel[(programs,)](
        *(TensorDescriptor.from_tensor(matrix, [height, width]) for matrix, height, width in matrices),
        bias, rows, len(weight), inner,
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, TANH=tanh, KEEPS=hidden is not None, PROGRAMS=programs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _tile_for(y: Tensor, width: int) -> Tile:
    """The large tile where all multiprocessors get several of it, else a smaller one: for an image or two."""
    large = Tile()
    tiles = ceil_div(y.numel() // y.shape[-1], large.rows) * ceil_div(width, large.columns)
    return large if tiles >= 4 * processors(y.device) else Tile(rows=64, inner=128)


def suits(y: Tensor, width: int) -> bool:
    """Whether it runs here, and there is something to do for all multiprocessors; otherwise the library is better."""
    columns, inner = Tile().columns, Tile().inner
    if not y.is_cuda or y.dtype != torch.bfloat16 or width % columns or y.shape[-1] % inner or y.numel() // y.shape[-1] < inner:
        return False
    return _works(y.device)


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether the device has what the kernel is made for, and it computes the right thing there."""
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False
    try:
        with torch.no_grad():
            return max(_difference(device, rows) for rows in (300, 50_000)) < 0.01  # a size for either tile
    except Exception:  # whatever a compiler or a driver may say; the other way is there
        return False


def _difference(device: torch.device, rows: int) -> float:
    """How far off value and product are, relative to their size."""
    generator, sizes = torch.Generator(device).manual_seed(0), ((rows, 64), (256, 64), (256,))
    y, weight, bias = (torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) for size in sizes)
    hidden = y.new_empty(rows, 256)
    with torch.autocast(device.type, enabled=False):
        product = F.linear(y.float(), weight.float())
    found = torch.cat([up_gelu(y, weight, bias, False, hidden=hidden), hidden, up_gelu(y, weight, bias, False)]).float()
    expected = torch.cat([F.gelu(product + bias), product, F.gelu(product + bias)])
    return float((found - expected).norm() / expected.norm())
