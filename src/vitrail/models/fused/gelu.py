"""Bias, GELU and dropout, and their gradient, each in one pass over memory; backward gives the bias' gradient and the value, too.

The bias of the product before is added here because a product without one is faster. The error function is Abramowitz and
Stegun's 7.1.26 (off by at most 1.5e-7): its exponential is the normal density's, which the gradient needs anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.dropout import kept
from vitrail.models.fused.fp8 import E4M3_MAX, Fp8Tensor, empty_fp8, scaled
from vitrail.models.fused.launch import ceil_div, is_fake, next_power_of_2, num_sms

_TILE = (2, 1024)  # rows and columns that a program takes at once: the fastest of a dozen on an H200


@triton.jit
def share(x, TANH: tl.constexpr):
    """Φ(x), by which GELU multiplies x, and its derivative."""
    if TANH:
        inner = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
        chance = 1.0 / (1.0 + tl.exp2(inner * -2.8853900817779268))
        density = 2.0 * chance * (1.0 - chance) * (0.7978845608028654 + 0.10703222440890037 * x * x)
    else:
        distance = tl.abs(x) * 0.7071067811865476
        bell = tl.exp2(x * x * -0.7213475204444817)
        t = 1.0 / (1.0 + 0.3275911 * distance)
        tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * bell * 0.5
        chance = tl.where(x < 0, tail, 1.0 - tail)
        density = bell * 0.3989422804014327
    return chance, density


@triton.jit
def _gelu_forward_kernel(
    h, bias, g, scales, seed, rows, width, rate,
    TANH: tl.constexpr, DROPS: tl.constexpr, EIGHT: tl.constexpr, E4M3_MAX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    mask = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(h + place, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    chance, _ = share(x, TANH)
    if DROPS:
        chance *= kept(seed, place, rate)
    value = x * chance
    if EIGHT:
        value, scale = scaled(value, E4M3_MAX)
        tl.store(scales + row, scale, mask=row < rows)
    tl.store(g + place, value.to(g.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_backward_kernel(
    h, bias, dg, dh, g, sums, seed, rows, width, rate,
    TANH: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program, programs = tl.program_id(1), tl.num_programs(1)
    inside = column < width
    offset = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(h + place, mask=mask, other=0.0).to(tl.float32) + offset[None, :]
        slope = tl.load(dg + place, mask=mask, other=0.0).to(tl.float32)
        chance, density = share(x, TANH)
        if DROPS:
            factor = kept(seed, place, rate)
            chance *= factor
            density *= factor
        slope *= chance + x * density
        tl.store(dh + place, slope.to(dh.dtype.element_ty), mask=mask)
        tl.store(g + place, (x * chance).to(g.dtype.element_ty), mask=mask)
        total += slope
    tl.store(sums + program * width + column, tl.sum(total, axis=0), mask=inside)


def gelu(h: Tensor, bias: Tensor, tanh: bool, seed: Tensor | None = None, rate: float = 0.0) -> Tensor:
    """GELU of `h` + `bias`, computed in float32; with a seed followed by dropout."""
    g = torch.empty_like(h)
    _launch(h, bias, g, None, tanh, seed, rate, _TILE)
    return g


def gelu_fp8(h: Tensor, bias: Tensor, tanh: bool, seed: Tensor | None = None, rate: float = 0.0) -> Fp8Tensor:
    """The same in eight bits, for a product. A row's scale needs the whole row."""
    made = empty_fp8(h)
    _launch(h, bias, *made, tanh, seed, rate, (1, next_power_of_2(h.shape[-1])))
    return made


def _launch(
    h: Tensor, bias: Tensor, g: Tensor, scales: Tensor | None, tanh: bool, seed: Tensor | None, rate: float, tile: tuple[int, int]
) -> None:
    if is_fake(h):
        return
    width, rows, (at_once, columns) = h.shape[-1], h.numel() // h.shape[-1], tile
    # Rows first: in the other directions a grid ends at 65,535 programs.
    _gelu_forward_kernel[(ceil_div(rows, at_once), ceil_div(width, columns))](
        h, bias, g, scales, seed, rows, width, rate,
        TANH=tanh, DROPS=seed is not None, EIGHT=scales is not None, E4M3_MAX=E4M3_MAX, ROWS=at_once, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def gelu_backward(
    h: Tensor, bias: Tensor, dg: Tensor, tanh: bool, seed: Tensor | None = None, rate: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient at `h` [..., column], its sum over all but columns in the bias' precision, and what `gelu` gave."""
    width, rows = h.shape[-1], h.numel() // h.shape[-1]
    dh, g = torch.empty_like(h), torch.empty_like(h)
    at_once, columns = _TILE
    programs = max(1, min(ceil_div(rows, at_once), num_sms(h.device) * 16 // ceil_div(width, columns)))
    sums = torch.empty(programs, width, dtype=torch.float32, device=h.device)
    if not is_fake(h):
        _gelu_backward_kernel[(ceil_div(width, columns), programs)](
            h, bias, dg, dh, g, sums, seed, rows, width, rate,
            TANH=tanh, DROPS=seed is not None, ROWS=at_once, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return dh, column_sum(sums, bias.dtype), g
