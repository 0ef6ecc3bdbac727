"""The two branches of an encoder block, each one step of autograd: products by the library, everything around them fused.

Both take the normed tokens and leave out their last bias: it is added with the residual. Weight gradients are summed and
returned in float32, which is exacter than rounding them first, and faster. With `again` they keep products only: the normed tokens
are made again from the stream, which is kept anyway, and attention is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.attention import attention, attention_backward
from vitrail.models.fused.gelu import gelu, gelu_backward
from vitrail.models.fused.launching import is_fake
from vitrail.models.fused.norm import normed


class Again(NamedTuple):
    """What the normed tokens can be made of again."""

    stream: Tensor
    weight: Tensor
    shift: Tensor
    eps: float

    def tokens(self, dtype: torch.dtype) -> Tensor:
        return normed(*self, dtype)


class AttentionBranch(torch.autograd.Function):
    """Tokens → queries, keys, values → attention → output projection, without that projection's bias.

    With `first` there are queries, and an output, only for so many of the first tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, qkv_weight: Tensor, qkv_bias: Tensor | None, out_weight: Tensor, heads: int, first: int | None,
        again: Again | None,
    ) -> Tensor:  # fmt: skip
        qkv_low, out_low = qkv_weight.to(y.dtype), out_weight.to(y.dtype)
        bias = None if qkv_bias is None else qkv_bias.to(y.dtype)
        parts = _projected(y, qkv_low, bias, first)
        out, lse = attention(*_split(parts), heads)
        kept = (y, out, lse) if again is None else again[:3]
        ctx.save_for_backward(qkv_low, out_low, *kept, *parts)
        ctx.eps = None if again is None else again.eps
        ctx.heads, ctx.dtype = heads, qkv_weight.dtype
        return F.linear(out, out_low)

    @staticmethod
    def backward(ctx: Any, dbranch: Tensor) -> Any:
        qkv_low, out_low, y, out, lse, *parts = ctx.saved_tensors
        if ctx.eps is not None:
            y = Again(y, out, lse, ctx.eps).tokens(qkv_low.dtype)
            out, lse = attention(*_split(parts), ctx.heads)
        needs = ctx.needs_input_grad
        dout_weight = weight_gradient(dbranch, out, ctx.dtype) if needs[3] else None
        slopes = tuple(torch.empty_like(part) for part in parts)
        sums = attention_backward(*_split(parts), out, dbranch @ out_low, lse, ctx.heads, _split(slopes))
        dy, dweight = _unprojected(slopes, y, qkv_low, ctx.dtype if needs[1] else None)
        return dy, dweight, sums.sum(0).to(ctx.dtype) if needs[2] else None, dout_weight, None, None, None


def _projected(y: Tensor, weight: Tensor, bias: Tensor | None, first: int | None) -> tuple[Tensor, ...]:
    """Queries, keys and values side by side in one tensor; with `first`, queries in one and the others in another."""
    if first is None:
        return (F.linear(y, weight, bias),)
    width = y.shape[-1]
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    return F.linear(y[:, :first], weight[:width], q_bias), F.linear(y, weight[width:], kv_bias)


def _unprojected(slopes: tuple[Tensor, ...], y: Tensor, weight: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """The gradients at the tokens and, if a precision is given for it, at the weight."""
    if len(slopes) == 1:
        return slopes[0] @ weight, weight_gradient(slopes[0], y, dtype) if dtype else None
    width, few = y.shape[-1], slopes[0].shape[1]
    dy = slopes[1] @ weight[width:]
    dy[:, :few] += slopes[0] @ weight[:width]
    if dtype is None:
        return dy, None
    return dy, torch.cat([weight_gradient(slopes[0], y[:, :few], dtype), weight_gradient(slopes[1], y, dtype)])


def _split(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return parts[0].chunk(3, dim=-1) if len(parts) == 1 else (parts[0], *parts[1].chunk(2, dim=-1))  # type: ignore[return-value]


class MlpBranch(torch.autograd.Function):
    """Tokens → up → GELU, dropout → down, without the last bias. GELU's value is not kept: its gradient computes it again."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, tanh: bool, seed: Tensor | None, rate: float,
        again: Again | None,
    ) -> Tensor:  # fmt: skip
        up_low, down_low = up_weight.to(y.dtype), down_weight.to(y.dtype)
        hidden = F.linear(y, up_low, up_bias.to(y.dtype))
        ctx.save_for_backward(up_low, down_low, hidden, seed, *((y,) if again is None else again[:3]))
        ctx.eps = None if again is None else again.eps
        ctx.tanh, ctx.rate, ctx.dtype = tanh, rate, up_weight.dtype
        return F.linear(gelu(hidden, tanh, seed, rate), down_low)

    @staticmethod
    def backward(ctx: Any, dbranch: Tensor) -> Any:
        up_low, down_low, hidden, seed, y, *norm = ctx.saved_tensors
        dhidden, dbias, value = gelu_backward(hidden, dbranch @ down_low, ctx.tanh, seed, ctx.rate)
        needs = ctx.needs_input_grad
        ddown = weight_gradient(dbranch, value, ctx.dtype) if needs[3] else None
        del value
        if ctx.eps is not None:
            weight, shift = norm
            y = Again(y, weight, shift, ctx.eps).tokens(up_low.dtype)
        dup = weight_gradient(dhidden, y, ctx.dtype) if needs[1] else None
        return dhidden @ up_low, dup, dbias.to(ctx.dtype) if needs[2] else None, ddown, None, None, None, None


def weight_gradient(dout: Tensor, entered: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ over rows of dout ⊗ entered, summed in float32 and returned in the weight's precision."""
    left, right = dout.flatten(0, -2).t(), entered.flatten(0, -2)
    if is_fake(dout):
        return torch.empty(left.shape[0], right.shape[1], dtype=dtype, device=dout.device)
    if dout.is_cuda and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(dtype)
