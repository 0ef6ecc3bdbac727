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
from vitrail.models.fused.gelu import gelu, gelu_backward, gelu_eight
from vitrail.models.fused.launching import is_fake
from vitrail.models.fused.norm import normed
from vitrail.models.fused.products import Eight, EightLinear, LowLinear
from vitrail.models.fused.sums import added_up
from vitrail.models.fused.up_gelu import suits, up_gelu


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
        again: Again | None, eight: bool,
    ) -> Tensor:  # fmt: skip
        linear = EightLinear if eight and first is None else LowLinear
        ctx.qkv, ctx.out = linear(qkv_weight, y.dtype), linear(out_weight, y.dtype)
        bias = None if qkv_bias is None else qkv_bias.to(y.dtype)
        parts = (ctx.qkv(y, bias),) if first is None else _projected(y, ctx.qkv.weight, bias, first)
        out, lse = attention(*_split(parts), heads)
        kept = (y, out, lse) if again is None else again[:3]
        ctx.save_for_backward(*kept, *parts)
        ctx.eps = None if again is None else again.eps
        ctx.heads, ctx.dtypes = heads, (y.dtype, qkv_weight.dtype)
        return ctx.out(out)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dbranch: Tensor) -> Any:
        y, out, lse, *parts = ctx.saved_tensors
        low, dtype = ctx.dtypes
        if ctx.eps is not None:
            y = Again(y, out, lse, ctx.eps).tokens(low)
            out, lse = attention(*_split(parts), ctx.heads)
        needs = ctx.needs_input_grad
        dout_weight = weight_gradient(dbranch, out, dtype) if needs[3] else None
        slopes = tuple(torch.empty_like(part) for part in parts)
        sums = attention_backward(*_split(parts), out, ctx.out.back(dbranch), lse, ctx.heads, _split(slopes))
        if len(slopes) == 1:
            dy, dweight = ctx.qkv.back(slopes[0]), weight_gradient(slopes[0], y, dtype) if needs[1] else None
        else:
            dy, dweight = _unprojected(slopes, y, ctx.qkv.weight, dtype if needs[1] else None)
        return dy, dweight, added_up(sums, dtype) if needs[2] else None, dout_weight, None, None, None, None


def _projected(y: Tensor, weight: Tensor, bias: Tensor | None, first: int) -> tuple[Tensor, ...]:
    """Queries of the first tokens in one tensor, keys and values of all side by side in another."""
    width = y.shape[-1]
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    return F.linear(y[:, :first], weight[:width], q_bias), F.linear(y, weight[width:], kv_bias)


def _unprojected(slopes: tuple[Tensor, ...], y: Tensor, weight: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """The gradients at the tokens and, if a precision is given for it, at the weight, after `_projected`."""
    width, few = y.shape[-1], slopes[0].shape[1]
    dy = slopes[1] @ weight[width:]
    dy[:, :few] += slopes[0] @ weight[:width]
    if dtype is None:
        return dy, None
    return dy, torch.cat([weight_gradient(slopes[0], y[:, :few], dtype), weight_gradient(slopes[1], y, dtype)])


def _split(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return parts[0].chunk(3, dim=-1) if len(parts) == 1 else (parts[0], *parts[1].chunk(2, dim=-1))  # type: ignore[return-value]


class MlpBranch(torch.autograd.Function):
    """Tokens → up → GELU, dropout → down, without the last bias. GELU's value is not kept: its gradient computes it again.

    `learns` says whether there will be a gradient; without one, what enters GELU need not be kept either.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, tanh: bool, seed: Tensor | None, rate: float,
        again: Again | None, eight: bool, learns: bool,
    ) -> Tensor:  # fmt: skip
        linear = EightLinear if eight else LowLinear
        ctx.up, ctx.down = linear(up_weight, y.dtype), linear(down_weight, y.dtype)
        if not eight and seed is None and suits(y, len(up_weight)):
            hidden = y.new_empty(*y.shape[:-1], len(up_weight)) if learns else None
            value: Tensor | Eight = up_gelu(y, ctx.up.weight, up_bias, tanh, hidden=hidden)
        else:
            hidden = ctx.up(y)
            value = (gelu_eight if eight else gelu)(hidden, up_bias, tanh, seed, rate)
        ctx.save_for_backward(hidden, up_bias, seed, *((y,) if again is None else again[:3]))
        ctx.eps = None if again is None else again.eps
        ctx.tanh, ctx.rate, ctx.dtypes = tanh, rate, (y.dtype, up_weight.dtype)
        return ctx.down(value)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dbranch: Tensor) -> Any:
        hidden, bias, seed, y, *norm = ctx.saved_tensors
        low, dtype = ctx.dtypes
        dhidden, dbias, value = gelu_backward(hidden, bias, ctx.down.back(dbranch), ctx.tanh, seed, ctx.rate)
        needs = ctx.needs_input_grad
        ddown = weight_gradient(dbranch, value, dtype) if needs[3] else None
        del value
        if ctx.eps is not None:
            weight, shift = norm
            y = Again(y, weight, shift, ctx.eps).tokens(low)
        dup = weight_gradient(dhidden, y, dtype) if needs[1] else None
        return ctx.up.back(dhidden), dup, dbias if needs[2] else None, ddown, None, None, None, None, None, None


class Product(torch.autograd.Function):
    """x Wᵀ + b alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eight: bool) -> Tensor:
        ctx.linear = (EightLinear if eight else LowLinear)(weight, x.dtype)
        ctx.save_for_backward(x)
        ctx.dtype = weight.dtype
        return ctx.linear(x, None if bias is None else bias.to(x.dtype))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (x,), needs, slope = ctx.saved_tensors, ctx.needs_input_grad, slope.contiguous()
        dweight = weight_gradient(slope, x, ctx.dtype) if needs[1] else None
        dbias = slope.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.dtype) if needs[2] else None
        return ctx.linear.back(slope), dweight, dbias, None


def weight_gradient(dout: Tensor, entered: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ over rows of dout ⊗ entered, summed in float32 and returned in the weight's precision."""
    left, right = dout.flatten(0, -2).t(), entered.flatten(0, -2)
    if is_fake(dout):
        return torch.empty(left.shape[0], right.shape[1], dtype=dtype, device=dout.device)
    if dout.is_cuda and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(dtype)
