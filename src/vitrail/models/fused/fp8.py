"""Matmuls with a layer's weight: in the tokens' precision, or in fp8 with a scale per row.

fp8 (e4m3: sign, four exponent bits, three mantissa bits) nearly halves the time of a matmul, with relative errors up to 1/16. Every
row has its own scale, so that a large token does not cost the others their precision. Weight gradients, sums over all tokens, stay
in the tokens' precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import ceil_div, next_power_of_2
from vitrail.models.fused.ops import matmul_flops, op
from vitrail.models.fused.selection import use_own_matmul

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max


class Fp8Tensor(NamedTuple):
    """fp8 values [..., width], and the scale by which each row is multiplied [rows]."""

    values: Tensor
    scales: Tensor


class Bf16Linear:
    """x Wᵀ + b in the tokens' precision (bfloat16 or float16)."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)

    def __call__(self, x: Tensor | Fp8Tensor, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        if bias is None or not use_own_matmul(x, len(self.weight), "bias"):
            return F.linear(x, self.weight, bias)
        from vitrail.models.fused.hopper_matmul import matmul_bias

        return matmul_bias(x, self.weight, bias)

    def grad_input(self, grad_out: Tensor) -> Tensor:
        return grad_out @ self.weight


class Fp8Linear:
    """x Wᵀ + b of fp8 values, accumulated in float32 and returned in the tokens' precision."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype

    def __call__(self, x: Tensor | Fp8Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if isinstance(x, Fp8Tensor) else quantise(x)
        return fp8_matmul(*x, *quantise(self.weight), bias, self.dtype)

    def grad_input(self, grad_out: Tensor) -> Tensor:
        transposed = self.weight.t().to(self.dtype, memory_format=torch.contiguous_format)
        return fp8_matmul(*quantise(grad_out), *quantise(transposed), None, self.dtype)


def _empty_matmul(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return torch.empty(*left.shape[:-1], len(right), dtype=dtype, device=left.device)


@op(
    "fp8_matmul(Tensor left, Tensor left_scale, Tensor right, Tensor right_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    _empty_matmul,
    lambda left, left_scale, right, *rest, **named: matmul_flops(left, right),
)
def fp8_matmul(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return left · rightᵀ + bias, with cuBLAS on a GPU; elsewhere, in tests, exactly."""
    rows, shape = left.flatten(0, -2), (*left.shape[:-1], len(right))
    if not rows.is_cuda:
        exact = (rows.float() * left_scale[:, None]) @ (right.float() * right_scale[:, None]).t()
        return (exact if bias is None else exact + bias).to(dtype).view(shape)
    scales = left_scale[:, None], right_scale[None, :]
    return torch._scaled_mm(rows, right.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=True).view(shape)


@triton.jit
def scale_rows(value, E4M3_MAX: tl.constexpr):
    """Divide the rows of a tile [row, column] so that they just fit into e4m3; return them and the divisors."""
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12) / E4M3_MAX
    return value / scale[:, None], scale


@triton.jit
def _quantise_kernel(
    x, values, scales, rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, E4M3_MAX: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value, scale = scale_rows(tl.load(x + offset, mask=mask, other=0.0).to(tl.float32), E4M3_MAX)
    tl.store(values + offset, value.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < rows)


def empty_fp8(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty values and scales for the rows of a tensor."""
    values = torch.empty(like.shape, dtype=E4M3, device=like.device)
    return values, torch.empty(like.numel() // like.shape[-1], dtype=torch.float32, device=like.device)


def _empty_quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    return empty_fp8(x)


@op("quantise_fp8(Tensor x) -> (Tensor, Tensor)", _empty_quantised)
def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = empty_fp8(x)
    width, rows = x.shape[-1], len(scales)
    padded = next_power_of_2(width)
    tile_rows = max(1, 4096 // padded)
    _quantise_kernel[(ceil_div(rows, tile_rows),)](
        x.contiguous(), values, scales, rows, WIDTH=width, PADDED=padded, ROWS=tile_rows, E4M3_MAX=E4M3_MAX, num_warps=4
    )
    return values, scales


def quantise(x: Tensor) -> Fp8Tensor:
    """Round x to fp8 with a scale per row."""
    return Fp8Tensor(*_quantise(x))
