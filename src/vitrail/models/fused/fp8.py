"""A layer's products with its weight: in the tokens' precision, or in eight-bit floats with a scale for every row.

Eight bits (e4m3: a sign, four bits of exponent, three of mantissa) nearly halve the time of a product, and are off by up to one
part in sixteen. Each row has a scale, so that a large token does not cost the others their digits. Weight gradients, which are
summed over all tokens, are not computed so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vitrail.models.fused.launch import is_fake, next_power_of_2
from vitrail.models.fused.selection import use_own_matmul

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max


class Fp8Tensor(NamedTuple):
    """Rows [..., width] of eight-bit floats, and what each is to be multiplied by [rows]."""

    values: Tensor
    scales: Tensor


class Bf16Linear:
    """Products in the precision of the tokens. Called it gives x Wᵀ + b, and `back` the gradient at x from that at the output."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)

    def __call__(self, x: Tensor | Fp8Tensor, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        if bias is None or not use_own_matmul(x, len(self.weight), "bias"):
            return F.linear(x, self.weight, bias)
        from vitrail.models.fused.hopper_matmul import matmul_bias

        return matmul_bias(x, self.weight, bias)

    def back(self, slope: Tensor) -> Tensor:
        return slope @ self.weight


class Fp8Linear:
    """Products of eight-bit floats, added up and given in the precision of the tokens."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype

    def __call__(self, x: Tensor | Fp8Tensor, bias: Tensor | None = None) -> Tensor:
        return _product(x if isinstance(x, Fp8Tensor) else quantise(x), quantise(self.weight), bias, self.dtype)

    def back(self, slope: Tensor) -> Tensor:
        turned = self.weight.t().to(self.dtype, memory_format=torch.contiguous_format)
        return _product(quantise(slope), quantise(turned), None, self.dtype)


def _product(left: Fp8Tensor, right: Fp8Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """left · rightᵀ + bias."""
    rows, shape = left.values.flatten(0, -2), (*left.values.shape[:-1], right.values.shape[0])
    if is_fake(rows):
        return torch.empty(shape, dtype=dtype, device=rows.device)
    if not rows.is_cuda:
        exact = (rows.float() * left.scales[:, None]) @ (right.values.float() * right.scales[:, None]).t()
        return (exact if bias is None else exact + bias).to(dtype).view(shape)
    scales = left.scales[:, None], right.scales[None, :]
    return torch._scaled_mm(rows, right.values.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=True).view(shape)


@triton.jit
def scaled(value, E4M3_MAX: tl.constexpr):
    """Rows of a tile [row, column] divided so that they just fit into eight bits, and by what."""
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12) / E4M3_MAX
    return value / scale[:, None], scale


@triton.jit
def _quantise_kernel(
    x, values, scales, rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, E4M3_MAX: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value, scale = scaled(tl.load(x + place, mask=mask, other=0.0).to(tl.float32), E4M3_MAX)
    tl.store(values + place, value.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < rows)


def empty_fp8(like: Tensor) -> Fp8Tensor:
    """Room for a tensor's rows in eight bits."""
    rows = like.numel() // like.shape[-1]
    return Fp8Tensor(
        torch.empty(like.shape, dtype=E4M3, device=like.device), torch.empty(rows, dtype=torch.float32, device=like.device)
    )


def quantise(x: Tensor) -> Fp8Tensor:
    """Every row of `x` in eight bits."""
    made, width = empty_fp8(x), x.shape[-1]
    padded = next_power_of_2(width)
    at_once = max(1, 4096 // padded)
    if not is_fake(x):
        _quantise_kernel[(triton.cdiv(len(made.scales), at_once),)](
            x.contiguous(), *made, len(made.scales), WIDTH=width, PADDED=padded, ROWS=at_once, E4M3_MAX=E4M3_MAX, num_warps=4
        )
    return made
