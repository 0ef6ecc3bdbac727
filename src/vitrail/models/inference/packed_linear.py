"""Linear layers for inference on a CPU: weights in oneDNN's blocked layout, GELU in the epilogue."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitrail.models.inference import onednn
from vitrail.models.inference.onednn import Gelu, MatmulPrecision

Quantised = tuple[Tensor, float, int]  # q (uint8), scale and zero point: q stands for scale · (q − zero)


class InferenceLinear(nn.Module):
    """x Wᵀ + b, then an optional GELU, of float32 tokens [image, token, channel].

    A layer may overwrite its input, which nothing else in an encoder block reads, unless hooks were registered. `dtype` is the
    output's.
    """

    def __init__(self, gelu: Gelu | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.gelu, self.dtype = gelu, dtype


class UnpackedLinear(InferenceLinear):
    """torch's own matmul, where oneDNN's does not work."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: Gelu | None, dtype: torch.dtype) -> None:
        super().__init__(gelu, dtype)
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return (y if self.gelu is None else F.gelu(y, approximate=self.gelu)).to(self.dtype)


class PackedLinear(InferenceLinear):
    """oneDNN's matmul in float32 or bfloat16. Bfloat16 is accumulated in float32 and rounded once, at the end."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, gelu: Gelu | None, dtype: torch.dtype, matmul_dtype: torch.dtype
    ) -> None:
        super().__init__(gelu, dtype)
        self.matmul_dtype = matmul_dtype
        self.packed = onednn.pack(weight.to(matmul_dtype))
        self.bias = None if bias is None else bias.to(matmul_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return onednn.packed_linear(x.to(self.matmul_dtype), self.packed, self.bias, self.gelu).to(self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the plain weight: oneDNN's layout has no storage that torch could copy."""
        return {**self.__dict__, "packed": onednn.unpack(self.packed)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "packed": onednn.pack(state["packed"])})  # type: ignore[no-untyped-call]


class Int8Linear(InferenceLinear):
    """An int8 matmul. Weights have one scale per output, inputs one per image: a result does not depend on its batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: Gelu | None, dtype: torch.dtype) -> None:
        super().__init__(gelu, dtype)
        self.scales = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1)).clamp(min=1e-30) / 127
        self.zeros = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
        self.packed = onednn.pack_int8((weight / self.scales[:, None]).round_().to(torch.int8))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        if RemovableHandle.next_id:  # a hook was registered in this process: it may keep what a layer takes or returns
            x = x.clone()
        found = [self._matmul(*quantise(image)) for image in x]
        if not found:
            return x.new_empty(*x.shape[:-1], len(self.scales), dtype=self.dtype)
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def _matmul(self, values: Tensor, scale: float, zero: int) -> Tensor:
        return onednn.int8_linear(values, scale, zero, self.packed, self.scales, self.zeros, self.bias, self.dtype, self.gelu)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the plain weight: oneDNN's layout has no storage that torch could copy."""
        return {**self.__dict__, "packed": onednn.unpack_int8(self.packed)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "packed": onednn.pack_int8(state["packed"])})  # type: ignore[no-untyped-call]


def quantise(x: Tensor) -> Quantised:
    """Round an image's tokens to uint8, linearly from the smallest to the largest value, with 0 exact. Overwrites `x`.

    254 steps, not 255: rounding `zero` may shift the largest value by half a step, and it must not leave the range. A value that is
    not finite makes the scale NaN, and with it the result.
    """
    smallest, largest = torch.aminmax(x)
    low, high = min(smallest.item(), 0.0), max(largest.item(), 0.0)
    scale = max((high - low) / 254, 1e-30)
    if not math.isfinite(low + high):
        return torch.zeros_like(x, dtype=torch.uint8), math.nan, 0
    zero = round(-low / scale)
    # Between 2²³ and 2²⁴ a float32 has no fraction: the sum is rounded to an integer, whose last byte is the result.
    shifted = torch.add(torch.tensor(1.5 * 2**23 + zero, dtype=x.dtype, device=x.device), x, alpha=1 / scale, out=x)
    return shifted.view(torch.int32).to(torch.uint8), scale, zero


def make_linear(
    weight: Tensor, bias: Tensor | None, precision: MatmulPrecision, *, gelu: Gelu | None = None, dtype: torch.dtype = torch.float32
) -> InferenceLinear:
    """Build the fastest layer of a precision that this torch can run."""
    weight, bias = weight.detach().float(), None if bias is None else bias.detach().float().expand(len(weight)).clone()
    if not onednn.works(precision):
        return UnpackedLinear(weight.clone(), bias, gelu, dtype)
    if precision == "int8":
        return Int8Linear(weight, bias, gelu, dtype)
    return PackedLinear(weight, bias, gelu, dtype, torch.float32 if precision == "fp32" else torch.bfloat16)
