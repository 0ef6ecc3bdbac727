"""oneDNN's matmuls, which torch has but does not document; each is tested before it is used.

They are internal to torch and may change; no result depends on them. `works` runs a small matmul through an operation and compares
it with the plain one: an operation that is missing, raises or is wrong is not used.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Gelu = Literal["tanh", "none"]  # torch.nn.functional.gelu's names: "none" is the exact one
MatmulPrecision = Literal["fp32", "bf16", "int8"]
GELUS: tuple[Gelu | None, ...] = (None, "tanh", "none")


def pack(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in the blocked layout oneDNN multiplies by; `unpack` undoes it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # type: ignore[no-any-return]


def unpack(packed: Tensor) -> Tensor:
    return packed.to_dense()


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, gelu: Gelu | None = None) -> Tensor:
    """Compute x Wᵀ + b in x's precision, with GELU in the epilogue."""
    kind, algorithm = ("none", "") if gelu is None else ("gelu", gelu)
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, kind, [], algorithm)  # type: ignore[no-any-return]


def pack_int8(weight: Tensor) -> Tensor:
    # It reads the memory row by row, whatever the strides.
    return torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)  # type: ignore[no-any-return]


def unpack_int8(packed: Tensor) -> Tensor:
    return packed.to_dense().T.contiguous()


def int8_linear(
    x: Tensor, scale: float, zero: int, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None,
    dtype: torch.dtype, gelu: Gelu | None = None,
) -> Tensor:  # fmt: skip
    """Compute scale · (x − zero) · (scales ⊙ W)ᵀ + b for uint8 x and int8 W, summed in int32."""
    kind, algorithm = ("none", "") if gelu is None else ("gelu", gelu)
    matmul: Any = torch.ops.onednn.qlinear_pointwise.default
    return matmul(x, scale, zero, packed, scales, zeros, bias, 1.0, 0, dtype, kind, [], algorithm)  # type: ignore[no-any-return]


@cache
def works(precision: MatmulPrecision) -> bool:
    """Tell whether the matmul of this precision exists and is right, with and without GELU.

    Runs in a thread of its own, where no setting of this thread applies: no autocast, no default device, no mode. The answer is
    remembered, and must not depend on them.
    """
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_is_right, precision).result()
    except Exception:  # a private operation may fail in as many ways as there are versions of torch
        return False


@torch.no_grad()
def _is_right(precision: MatmulPrecision) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-8, 8, (size, 32), generator=generator).to(torch.float32) for size in (5, 16))
    bias = torch.arange(16, dtype=torch.float32) / 4
    for gelu in GELUS:
        found = _small_matmul(precision, x, weight, bias, gelu)
        expected = F.linear(x, weight, bias)
        expected = expected if gelu is None else F.gelu(expected, approximate=gelu)
        tolerance = 1e-2 if precision == "bf16" else 1e-4
        if not torch.allclose(found.to(torch.float32), expected, rtol=tolerance, atol=1e-3):
            return False
    return True


def _small_matmul(precision: MatmulPrecision, x: Tensor, weight: Tensor, bias: Tensor, gelu: Gelu | None) -> Tensor:
    """Multiply small integers, which are exact in every precision."""
    if precision == "int8":
        ones, zeros = torch.ones(len(weight), dtype=torch.float32), torch.zeros(len(weight), dtype=torch.int32)
        packed = pack_int8(weight.to(torch.int8))
        return int8_linear((x + 8).to(torch.uint8), 1.0, 8, packed, ones, zeros, bias, torch.float32, gelu)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    return packed_linear(x.to(dtype), pack(weight.to(dtype)), bias.to(dtype), gelu)
