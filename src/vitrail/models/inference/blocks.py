"""Encoder blocks for inference: the same function as `Block`, arranged for a processor's caches and instructions."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.inference.linear import make_linear
from vitrail.models.inference.operations import Kind
from vitrail.models.layers import LayerScale
from vitrail.models.vit import Block

CHUNK = {"fp32": 4, "bf16": 4, "int8": 1}  # images a block works on at once; with int8 each image has scales of its own
SCORES = 5 << 18  # bytes of attention scores at once: as much as a core's own cache may hold


@dataclass(frozen=True)
class Style:
    """How blocks compute: the products, and whether attention runs in bfloat16."""

    kind: Kind
    attention_bf16: bool


class FastBlock(nn.Module):
    """Computes a few images at a time, so that what passes between two products stays in the cache.

    Layer scale and attention's 1/√d are multiplied into the weights. The residual stream and the norms are float32.
    """

    def __init__(self, block: Block, style: Style) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.heads, self.style = attention.heads, style
        self.norm1, self.norm2 = copy.deepcopy(block.norm1), copy.deepcopy(block.norm2)
        width = attention.out.weight.shape[0]
        # q carries 1/√d and, for attention by powers of two, log₂e.
        self.unit = math.log2(math.e) if style.attention_bf16 else 1.0
        factor = torch.ones(3 * width, 1)
        factor[:width] = self.unit / math.sqrt(width // self.heads)
        weight = self._entered(attention.qkv, self.norm1) * factor
        bias = None if attention.qkv.bias is None else attention.qkv.bias.detach().float() * factor[:, 0]
        low = torch.bfloat16 if style.attention_bf16 else torch.float32
        self.qkv = make_linear(weight, bias, style.kind, dtype=low)
        self.out = make_linear(*_scaled(attention.out, block.scale1), style.kind)
        gelu = "tanh" if mlp.approximate == "tanh" else "none"
        self.up = make_linear(self._entered(mlp.up, self.norm2), mlp.up.bias, style.kind, gelu=gelu)  # type: ignore[arg-type]
        self.down = make_linear(*_scaled(mlp.down, block.scale2), style.kind)

    def _entered(self, linear: nn.Linear, norm: nn.LayerNorm) -> Tensor:
        """The weight of a layer that follows a norm; for bytes, with channels brought to one size between the two."""
        weight = linear.weight.detach().float()
        return _balanced(weight, norm) if self.style.kind == "int8" else weight

    def forward(self, x: Tensor, bias: Tensor | None = None, first: int | None = None) -> Tensor:
        """With `first` only the first tokens come out, though they still look at all."""
        size = CHUNK[self.style.kind]
        bias = None if bias is None else bias[..., :first, :] * self.unit
        found = torch.empty_like(x[:, :first])
        for part, into in zip(x.split(size), found.split(size), strict=True):
            attended = self._attend(*self._split(part, first), bias)
            self._after_attention(part[:, :first], attended, into)
        return found

    def with_attention(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block's output, and its attention [batch, head, query, key]."""
        q, k, v = (part.float() for part in self._split(x, None))
        scores = (q @ k.transpose(-2, -1)) / self.unit
        weights = (scores if bias is None else scores + bias).softmax(dim=-1)
        found = torch.empty_like(x)
        for part, attended, into in zip(x.split(1), (weights @ v).split(1), found.split(1), strict=True):
            self._after_attention(part, attended, into)
        return found, weights

    def _split(self, x: Tensor, first: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the first tokens, keys and values of all: [image, head, token, channel]."""
        qkv = self.qkv(_norm(x, self.norm1)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.contiguous().unbind(0)  # the products below lose more to strides than the copy costs
        return q[:, :, :first], k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """softmax(qkᵀ) v, q being scaled already: [image, head, token, channel] in float32."""
        if not self.style.attention_bf16:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        rows = max(1, SCORES // (2 * q.shape[2] * k.shape[2]))
        if bias is not None:
            bias = bias.to(q.dtype).expand(q.shape[0], -1, -1, -1).flatten(0, 1)
        several = (part.flatten(0, 1).split(rows) for part in (q, k, v))
        biases = repeat(None) if bias is None else bias.split(rows)
        found = list(map(_by_powers_of_two, *several, biases))
        together: Tensor = found[0] if len(found) == 1 else torch.cat(found)
        return together.view(*q.shape)

    def _after_attention(self, x: Tensor, attended: Tensor, into: Tensor) -> None:
        y = x + self.out(attended.transpose(1, 2).flatten(2))
        torch.add(y, self.down(self.up(_norm(y, self.norm2))), out=into)


def _by_powers_of_two(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(scores · ln 2) v for scores qkᵀ + bias: powers of two, and the division last, where there is least to divide.

    The usual subtraction of the greatest score only guards the range; a float's precision does not depend on it. So the range
    is looked at afterwards, and the guarded way taken in the rare case that it was left.
    """
    powers = _scores(q, k, bias).exp2_()
    total = powers.sum(dim=-1, keepdim=True, dtype=torch.float32)
    least, greatest = torch.aminmax(total)
    if least.item() > 1e-20 and greatest.item() < 1e30:  # not so for NaN either
        return torch.bmm(powers, v) / total
    return torch.bmm((_scores(q.float(), k.float(), bias) * math.log(2)).softmax(dim=-1), v.float())


def _scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2))
    return scores if bias is None else scores + bias


@torch.no_grad()
def _balanced(weight: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Divide a norm's output by a factor a channel and multiply the weight by it: the same function, easier to round.

    Bytes have one scale for all channels of an image. In trained models a few channels reach far further than the rest, which
    would be left with a few steps; how far they reach can be read from the norm itself. The factor is the geometric mean of
    what suits the two sides.
    """
    reach = 3 * norm.weight.float().abs() + norm.bias.float().abs()  # three standard deviations
    factor = ((reach + 1e-6) / (weight.abs().amax(dim=0) + 1e-6)).sqrt()
    factor = factor / factor.median()
    norm.weight.copy_(norm.weight.float() / factor)
    norm.bias.copy_(norm.bias.float() / factor)
    return weight * factor


def _norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _scaled(linear: nn.Linear, scale: nn.Module) -> tuple[Tensor, Tensor | None]:
    """A layer's weight and bias with the layer scale that follows it multiplied in."""
    weight, bias = linear.weight.detach().float(), linear.bias
    if not isinstance(scale, LayerScale):
        return weight, bias
    factor = scale.weight.detach().float()
    return weight * factor[:, None], None if bias is None else bias.detach() * factor
