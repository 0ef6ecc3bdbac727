"""Bias, GELU and dropout in one pass over memory, forward and backward; backward also gives the bias gradient and GELU's value.

The bias of the matmul before is added here because a matmul without one is faster. The error function is Abramowitz and Stegun's
7.1.26 (error below 1.5e-7): its exponential is that of the normal density, which the gradient needs anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.dropout import dropout_scale
from vitrail.models.fused.fp8 import E4M3_MAX, Fp8Tensor, empty_fp8, scale_rows
from vitrail.models.fused.launch import ceil_div, next_power_of_2, num_sms
from vitrail.models.fused.ops import op

_TILE = (2, 1024)  # rows and columns: the fastest of a dozen on an H200


@triton.jit
def gelu_cdf(x, TANH: tl.constexpr):
    """Return Φ(x), by which GELU multiplies x, and its derivative, the density."""
    if TANH:
        inner = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
        cdf = 1.0 / (1.0 + tl.exp2(inner * -2.8853900817779268))
        pdf = 2.0 * cdf * (1.0 - cdf) * (0.7978845608028654 + 0.10703222440890037 * x * x)
    else:
        z = tl.abs(x) * 0.7071067811865476
        exponential = tl.exp2(x * x * -0.7213475204444817)
        t = 1.0 / (1.0 + 0.3275911 * z)
        tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * exponential * 0.5
        cdf = tl.where(x < 0, tail, 1.0 - tail)
        pdf = exponential * 0.3989422804014327
    return cdf, pdf


@triton.jit
def _gelu_forward_kernel(
    h, bias, g, scales, seed, rows, width, rate,
    TANH: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, FP8: tl.constexpr, E4M3_MAX: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < width
    mask = (row < rows)[:, None] & column_mask[None, :]
    offset = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(h + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    cdf, _ = gelu_cdf(x, TANH)
    if DROPS:
        cdf *= dropout_scale(seed, offset, rate)
    value = x * cdf
    if FP8:
        value, scale = scale_rows(value, E4M3_MAX)
        tl.store(scales + row, scale, mask=row < rows)
    tl.store(g + offset, value.to(g.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_backward_kernel(
    h, bias, dg, dh, g, sums, seed, rows, width, rate,
    TANH: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program, programs = tl.program_id(1), tl.num_programs(1)
    column_mask = column < width
    if HAS_BIAS:
        b = tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & column_mask[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(h + offset, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += b[None, :]
        grad = tl.load(dg + offset, mask=mask, other=0.0).to(tl.float32)
        cdf, pdf = gelu_cdf(x, TANH)
        if DROPS:
            factor = dropout_scale(seed, offset, rate)
            cdf *= factor
            pdf *= factor
        grad *= cdf + x * pdf
        tl.store(dh + offset, grad.to(dh.dtype.element_ty), mask=mask)
        tl.store(g + offset, (x * cdf).to(g.dtype.element_ty), mask=mask)
        total += grad
    tl.store(sums + program * width + column, tl.sum(total, axis=0), mask=column_mask)


def _empty(h: Tensor, bias: Tensor | None, tanh: bool, seed: Tensor | None = None, rate: float = 0.0) -> Tensor:
    return torch.empty(h.shape, dtype=h.dtype, device=h.device)


@op("gelu(Tensor h, Tensor? bias, bool tanh, Tensor? seed=None, float rate=0.) -> Tensor", _empty)
def gelu(h: Tensor, bias: Tensor | None, tanh: bool, seed: Tensor | None = None, rate: float = 0.0) -> Tensor:
    """Return GELU(h + bias), computed in float32; with a seed, dropout follows."""
    g = _empty(h, bias, tanh)
    _launch(h, bias, g, None, tanh, seed, rate, _TILE)
    return g


def _empty_fp8(h: Tensor, bias: Tensor | None, tanh: bool, seed: Tensor | None = None, rate: float = 0.0) -> tuple[Tensor, Tensor]:
    return empty_fp8(h)


@op("gelu_fp8(Tensor h, Tensor? bias, bool tanh, Tensor? seed=None, float rate=0.) -> (Tensor, Tensor)", _empty_fp8)
def _gelu_fp8(h: Tensor, bias: Tensor | None, tanh: bool, seed: Tensor | None = None, rate: float = 0.0) -> tuple[Tensor, Tensor]:
    values, scales = empty_fp8(h)
    _launch(h, bias, values, scales, tanh, seed, rate, (1, next_power_of_2(h.shape[-1])))  # a row's scale needs the whole row
    return values, scales


def gelu_fp8(h: Tensor, bias: Tensor | None, tanh: bool, seed: Tensor | None = None, rate: float = 0.0) -> Fp8Tensor:
    """Return what `gelu` returns, in fp8 with a scale per row."""
    return Fp8Tensor(*_gelu_fp8(h, bias, tanh, seed, rate))


def _launch(
    h: Tensor, bias: Tensor | None, g: Tensor, scales: Tensor | None, tanh: bool, seed: Tensor | None, rate: float,
    tile: tuple[int, int],
) -> None:  # fmt: skip
    width, rows, (tile_rows, columns) = h.shape[-1], h.numel() // h.shape[-1], tile
    # Rows are the grid's first dimension: the others end at 65,535 programs.
    _gelu_forward_kernel[(ceil_div(rows, tile_rows), ceil_div(width, columns))](
        h.contiguous(), bias, g, scales, seed, rows, width, rate,
        TANH=tanh, HAS_BIAS=bias is not None, DROPS=seed is not None, FP8=scales is not None, E4M3_MAX=E4M3_MAX,
        ROWS=tile_rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def _empty_backward(
    h: Tensor, bias: Tensor | None, dg: Tensor, tanh: bool, seed: Tensor | None = None, rate: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    dh, g = (torch.empty(h.shape, dtype=h.dtype, device=h.device) for _ in range(2))
    return dh, torch.empty(h.shape[-1], dtype=torch.float32 if bias is None else bias.dtype, device=h.device), g


@op(
    "gelu_backward(Tensor h, Tensor? bias, Tensor dg, bool tanh, Tensor? seed=None, float rate=0.) -> (Tensor, Tensor, Tensor)",
    _empty_backward,
)
def gelu_backward(
    h: Tensor, bias: Tensor | None, dg: Tensor, tanh: bool, seed: Tensor | None = None, rate: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient at h [..., column], its column sums in the bias' precision, and what `gelu` returned."""
    width, rows = h.shape[-1], h.numel() // h.shape[-1]
    dh, g = (torch.empty(h.shape, dtype=h.dtype, device=h.device) for _ in range(2))
    tile_rows, columns = _TILE
    programs = max(1, min(ceil_div(rows, tile_rows), num_sms(h.device) * 16 // ceil_div(width, columns)))
    sums = torch.empty(programs, width, dtype=torch.float32, device=h.device)
    _gelu_backward_kernel[(ceil_div(width, columns), programs)](
        h.contiguous(), bias, dg.contiguous(), dh, g, sums, seed, rows, width, rate,
        TANH=tanh, HAS_BIAS=bias is not None, DROPS=seed is not None, ROWS=tile_rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return dh, column_sum(sums, torch.float32 if bias is None else bias.dtype), g
