"""Encoder blocks for inference on a CPU: the same function as `Block`, arranged for its caches and instructions."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.inference.onednn import MatmulPrecision
from vitrail.models.inference.packed_linear import make_linear
from vitrail.models.layers import LayerScale
from vitrail.models.vit import Block

CHUNK: dict[MatmulPrecision, int] = {"fp32": 4, "bf16": 4, "int8": 1}  # images a block computes at once; int8 scales are per image
SCORES_BYTES = 5 << 18  # of attention scores computed at once: they stay in a core's own cache


@dataclass(frozen=True)
class BlockPrecision:
    """The precision of a block's matmuls, and whether its attention runs in bfloat16."""

    matmul: MatmulPrecision
    attention_bf16: bool


class PackedBlock(nn.Module):
    """A block that computes a few images at a time, so that what passes between two matmuls stays in the cache.

    Layer scale and attention's 1/√d are multiplied into the weights (with `qk_norm`, into the queries' norm). The residual stream
    and the norms are float32. Only for blocks that are plain (`is_plain_block`): nothing of the block given is called.
    """

    attention: None = None  # `resize` looks for axial attention, which has a grid

    def __init__(self, block: Block, precision: BlockPrecision) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.heads, self.precision = attention.heads, precision
        self.norm1, self.norm2 = copy.deepcopy(block.norm1).float(), copy.deepcopy(block.norm2).float()
        width = attention.out.weight.shape[0]
        # q carries 1/√d and, for a softmax by powers of two, log₂e.
        self.score_scale = math.log2(math.e) if precision.attention_bf16 else 1.0
        scale = self.score_scale / math.sqrt(width // self.heads)
        self.q_norm, self.k_norm = _scaled_norm(attention.q_norm, scale), _scaled_norm(attention.k_norm, 1.0)
        factor = torch.ones(3 * width, 1, dtype=torch.float32, device=attention.out.weight.device)
        factor[:width] = scale if self.q_norm is None else 1.0
        weight = self._after_norm(attention.qkv, self.norm1) * factor
        bias = None if attention.qkv.bias is None else attention.qkv.bias.detach().float() * factor[:, 0]
        qkv_dtype = torch.bfloat16 if precision.attention_bf16 else torch.float32
        self.qkv = make_linear(weight, bias, precision.matmul, dtype=qkv_dtype)
        self.out = make_linear(*_scaled(attention.out, block.scale1), precision.matmul)
        gelu = "tanh" if mlp.approximate == "tanh" else "none"
        self.up = make_linear(self._after_norm(mlp.up, self.norm2), mlp.up.bias, precision.matmul, gelu=gelu)  # type: ignore[arg-type]
        self.down = make_linear(*_scaled(mlp.down, block.scale2), precision.matmul)

    def _after_norm(self, linear: nn.Linear, norm: nn.LayerNorm) -> Tensor:
        """Return the weight of a layer that follows a norm; for int8, with the channels of the two balanced."""
        weight = linear.weight.detach().float()
        return _balanced(weight, norm) if self.precision.matmul == "int8" else weight

    def forward(self, x: Tensor, bias: Tensor | None = None, num_queries: int | None = None) -> Tensor:
        """With `num_queries` compute only so many of the first tokens, which still attend to all."""
        size = CHUNK[self.precision.matmul]
        bias = None if bias is None else bias[..., :num_queries, :] * self.score_scale
        found = torch.empty_like(x[:, :num_queries])
        if not len(x):
            return found
        for part, into in zip(x.split(size), found.split(size), strict=True):
            attended = self._attend(*self._split(part, num_queries), bias)
            self._after_attention(part[:, :num_queries], attended, into)
        return found

    def with_attention(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the block's output, and its attention [batch, head, query, key]."""
        if not len(x):
            return torch.empty_like(x), x.new_empty(0, self.heads, x.shape[1], x.shape[1])
        q, k, v = (part.float() for part in self._split(x, None))
        scores = (q @ k.transpose(-2, -1)) / self.score_scale
        weights = (scores if bias is None else scores + bias).softmax(dim=-1)
        found = torch.empty_like(x)
        for part, attended, into in zip(x.split(1), (weights @ v).split(1), found.split(1), strict=True):
            self._after_attention(part, attended, into)
        return found, weights

    def _split(self, x: Tensor, num_queries: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of the first tokens, keys and values of all: [image, head, token, channel]."""
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.contiguous().unbind(0)  # the matmuls below lose more to strides than the copy costs
        q = q[:, :, :num_queries]
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """softmax(qkᵀ) v, q being scaled already: [image, head, token, channel] in float32."""
        if not self.precision.attention_bf16:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        rows = max(1, SCORES_BYTES // (2 * q.shape[2] * k.shape[2]))
        if bias is not None:
            bias = bias.to(q.dtype).expand(*q.shape[:2], -1, -1).flatten(0, 1)
        parts = (part.flatten(0, 1).split(rows) for part in (q, k, v))
        biases = repeat(None) if bias is None else bias.split(rows)
        found = list(map(_attend_exp2, *parts, biases))
        together: Tensor = found[0] if len(found) == 1 else torch.cat(found)
        return together.view(*q.shape)

    def _after_attention(self, x: Tensor, attended: Tensor, into: Tensor) -> None:
        y = x + self.out(attended.transpose(1, 2).flatten(2))
        torch.add(y, self.down(self.up(self.norm2(y))), out=into)


def _attend_exp2(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(scores · ln 2) v for scores qkᵀ + bias: powers of two, and the division last, where there is least to divide.

    The usual subtraction of the largest score only guards the range; a float's precision does not depend on it. So the range
    is checked afterwards, and the guarded form computed in the rare case that the sums left it: for those heads alone, since a
    head of another image must not be rounded otherwise because of them.
    """
    powers = _scores(q, k, bias).exp2_()
    total = powers.sum(dim=-1, keepdim=True, dtype=torch.float32)
    found = torch.bmm(powers, v) / total
    smallest, largest = torch.aminmax(total)
    if smallest.item() > 1e-20 and largest.item() < 1e30:  # false for NaN too
        return found
    heads = ~((total > 1e-20) & (total < 1e30)).flatten(1).all(dim=1)
    scores = _scores(q[heads].float(), k[heads].float(), None if bias is None else bias[heads])
    found[heads] = torch.bmm((scores * math.log(2)).softmax(dim=-1), v[heads].float())
    return found


def _scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2))
    return scores if bias is None else scores + bias


@torch.no_grad()
def _balanced(weight: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Divide a norm's output by one factor per channel and multiply the weight by it: the same function, easier to round.

    int8 has one scale for all channels of an image. In trained models a few channels have a far larger range than the rest, which
    would be left with a few steps; the range can be read from the norm itself. The factor is the geometric mean of what suits the
    two sides.
    """
    reach = 3 * norm.weight.abs() + norm.bias.abs()  # three standard deviations
    factor = ((reach + 1e-6) / (weight.abs().amax(dim=0) + 1e-6)).sqrt()
    factor = factor / factor.median()
    norm.weight.div_(factor)
    norm.bias.div_(factor)
    return weight * factor


def _scaled_norm(norm: nn.LayerNorm | None, factor: float) -> nn.LayerNorm | None:
    """Return a norm in float32 whose output is multiplied by a factor."""
    if norm is None:
        return None
    made = copy.deepcopy(norm).float()
    made.weight.data.mul_(factor)
    made.bias.data.mul_(factor)
    return made


def _scaled(linear: nn.Linear, scale: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a layer's weight and bias with the layer scale that follows it multiplied in."""
    weight, bias = linear.weight.detach().float(), linear.bias
    if not isinstance(scale, LayerScale):
        return weight, bias
    factor = scale.weight.detach().float()
    return weight * factor[:, None], None if bias is None else bias.detach() * factor
