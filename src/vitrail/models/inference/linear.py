"""Linear layers for inference: weights kept as the processor likes to read them, GELU done on the way out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.inference import operations
from vitrail.models.inference.operations import Gelu, Kind

Quantised = tuple[Tensor, float, int]  # bytes, and scale and zero: a byte stands for scale · (byte − zero)


class FastLinear(nn.Module):
    """x Wᵀ + b, then GELU if it was asked for, of float32 tokens [image, token, channel].

    What is passed in is used up: a layer may write over its input, which in an encoder no one else reads.
    """

    def __init__(self, gelu: Gelu | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.gelu, self.dtype = gelu, dtype  # of the output


class PlainLinear(FastLinear):
    """torch's own, where nothing better is to be had."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: Gelu | None, dtype: torch.dtype) -> None:
        super().__init__(gelu, dtype)
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return (y if self.gelu is None else F.gelu(y, approximate=self.gelu)).to(self.dtype)


class PackedLinear(FastLinear):
    """oneDNN's product in float32 or bfloat16. Bfloat16 is summed in float32 and rounded once, at the end."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: Gelu | None, dtype: torch.dtype, inside: torch.dtype) -> None:
        super().__init__(gelu, dtype)
        self.inside = inside
        self.packed = operations.pack(weight.to(inside))
        self.bias = None if bias is None else bias.to(inside)

    def forward(self, x: Tensor) -> Tensor:
        return operations.packed_linear(x.to(self.inside), self.packed, self.bias, self.gelu).to(self.dtype)


class Int8Linear(FastLinear):
    """Bytes times bytes. Weights have a scale an output, inputs a scale an image, so that no image feels its neighbours."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: Gelu | None, dtype: torch.dtype) -> None:
        super().__init__(gelu, dtype)
        self.scales = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1)).clamp(min=1e-30) / 127
        self.zeros = torch.zeros(len(weight), dtype=torch.int32)
        self.packed = operations.pack_int8((weight / self.scales[:, None]).round_().to(torch.int8))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        found = [self._product(*quantise(one)) for one in x]
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def _product(self, values: Tensor, scale: float, zero: int) -> Tensor:
        return operations.int8_linear(values, scale, zero, self.packed, self.scales, self.zeros, self.bias, self.dtype, self.gelu)


def quantise(x: Tensor) -> Quantised:
    """An image's tokens as bytes, evenly from the least to the greatest value, with zero met exactly. Writes over `x`.

    254 steps, not 255: rounding `zero` may shift the greatest value by half a step, and it must not leave the range. What is
    not finite makes the scale so, and with it the result.
    """
    least, greatest = torch.aminmax(x)
    low, high = min(least.item(), 0.0), max(greatest.item(), 0.0)
    scale = max((high - low) / 254, 1e-30)
    if not math.isfinite(low + high):
        return torch.zeros_like(x, dtype=torch.uint8), math.nan, 0
    zero = round(-low / scale)
    # Between 2²³ and 2²⁴ a float32 has no fraction: the sum is rounded to a whole number, whose last byte is what is wanted.
    shifted = torch.add(torch.tensor(1.5 * 2**23 + zero), x, alpha=1 / scale, out=x)
    return shifted.view(torch.int32).to(torch.uint8), scale, zero


def make_linear(
    weight: Tensor, bias: Tensor | None, kind: Kind, *, gelu: Gelu | None = None, dtype: torch.dtype = torch.float32
) -> FastLinear:
    """The fastest layer of a kind that this torch can run."""
    weight, bias = weight.detach().float(), None if bias is None else bias.detach().float().clone()
    if not operations.works(kind):
        return PlainLinear(weight.clone(), bias, gelu, dtype)
    if kind == "int8":
        return Int8Linear(weight, bias, gelu, dtype)
    return PackedLinear(weight, bias, gelu, dtype, torch.float32 if kind == "fp32" else torch.bfloat16)
