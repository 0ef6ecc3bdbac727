"""The two branches of an encoder block, each one step of autograd: products by the library, everything around them fused.

Both take tokens with mean 0 and deviation 1, and the weights that their norm left to them (`scale` and `shift`; None if it has
none). Their own last bias is left out in turn: it is added with the residual. Weight gradients are summed and returned in float32,
which is exacter than rounding them first, and faster. With `light` they keep products only: attention and GELU are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.attention_backward import attention_backward
from vitrail.models.fused.attention_forward import attention
from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.fold_norm import fold_norm, unfold_norm
from vitrail.models.fused.fp8 import Bf16Linear, Fp8Linear, Fp8Tensor
from vitrail.models.fused.gelu import gelu, gelu_backward, gelu_fp8
from vitrail.models.fused.launch import is_fake
from vitrail.models.fused.selection import use_hopper_attention, use_own_matmul


class AttentionBranch(torch.autograd.Function):
    """Tokens → queries, keys, values → attention → output projection, without that projection's bias.

    With `first` there are queries, and an output, only for so many of the first tokens. `learns` says whether there will be a
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, scale: Tensor | None, shift: Tensor | None, qkv_weight: Tensor, qkv_bias: Tensor | None,
        out_weight: Tensor, heads: int, first: int | None, eight: bool, light: bool, learns: bool,
    ) -> Tensor:  # fmt: skip
        linear = Fp8Linear if eight and first is None else Bf16Linear
        weight, bias = fold_norm(qkv_weight, qkv_bias, scale, shift, y.dtype)
        ctx.qkv, ctx.out = linear(weight, y.dtype), linear(out_weight, y.dtype)
        bias = None if bias is None else bias.to(y.dtype)
        parts = (ctx.qkv(y, bias),) if first is None else _projected(y, weight, bias, first)
        out, lse = attended(parts, heads, learns)
        ctx.save_for_backward(y, scale, shift, qkv_weight, *((None, None) if light else (out, lse)), *parts)
        ctx.heads = heads
        return ctx.out(out)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dbranch: Tensor) -> Any:
        y, scale, shift, weight, out, lse, *parts = ctx.saved_tensors
        if out is None:
            out, lse = attended(parts, ctx.heads, True)
        needs, dtype = ctx.needs_input_grad, weight.dtype
        dout_weight = weight_gradient(dbranch, out, dtype) if needs[5] else None
        slopes = tuple(torch.empty_like(part) for part in parts)
        sums = attention_backward(*_split(parts), out, ctx.out.back(dbranch), lse, ctx.heads, _split(slopes))
        del out
        dbias = column_sum(sums, dtype)
        dentering: tuple[Tensor | None, ...] = None, None, None
        if any(needs[1:4]):
            found = [weight_gradient(one, y[:, : one.shape[1]], dtype) for one in slopes]
            dentering = unfold_norm(found[0] if len(found) == 1 else torch.cat(found), dbias, weight, scale, shift)
        dweight, dscale, dshift = dentering
        dy = ctx.qkv.back(slopes[0]) if len(slopes) == 1 else _unprojected(slopes, ctx.qkv.weight)
        return dy, dscale, dshift, dweight, dbias if needs[4] else None, dout_weight, None, None, None, None, None


def _projected(y: Tensor, weight: Tensor, bias: Tensor | None, first: int) -> tuple[Tensor, ...]:
    """Queries of the first tokens in one tensor, keys and values of all side by side in another."""
    width = y.shape[-1]
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    return F.linear(y[:, :first], weight[:width], q_bias), F.linear(y, weight[width:], kv_bias)


def _unprojected(slopes: tuple[Tensor, ...], weight: Tensor) -> Tensor:
    """The gradient at the tokens after `_projected`."""
    width, few = weight.shape[1], slopes[0].shape[1]
    dy = slopes[1] @ weight[width:]
    dy[:, :few] += slopes[0] @ weight[:width]
    return dy


def attended(parts: Sequence[Tensor], heads: int, learns: bool) -> tuple[Tensor, Tensor | None]:
    """Attention's output and, if something learns from them, the logarithms of softmax's denominators."""
    if len(parts) > 1 or not use_hopper_attention(parts[0], heads, learns):
        return attention(*_split(parts), heads)
    from vitrail.models.fused.hopper_attention import hopper_attention

    return hopper_attention(parts[0], heads, needs_grad=learns)


def _split(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return parts[0].chunk(3, dim=-1) if len(parts) == 1 else (parts[0], *parts[1].chunk(2, dim=-1))  # type: ignore[return-value]


class MlpBranch(torch.autograd.Function):
    """Tokens → up → GELU, dropout → down, without the last bias.

    GELU and its derivative are made and used in the ends of products where they can be, and kept between; elsewhere what enters
    GELU is kept, and its gradient computes its value again. `learns` says whether there will be a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, scale: Tensor | None, shift: Tensor | None, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor,
        tanh: bool, seed: Tensor | None, rate: float, eight: bool, light: bool, learns: bool,
    ) -> Tensor:  # fmt: skip
        linear = Fp8Linear if eight else Bf16Linear
        weight, bias = fold_norm(up_weight, up_bias, scale, shift, y.dtype)
        assert bias is not None
        ctx.up, ctx.down = linear(weight, y.dtype), linear(down_weight, y.dtype)
        ctx.in_products = not eight and seed is None and not (light and learns) and use_own_matmul(y, len(weight), "gelu")
        value: Tensor | Fp8Tensor
        kept: tuple[Tensor | None, ...]
        if ctx.in_products:
            from vitrail.models.fused.hopper_matmul import matmul_bias_gelu, matmul_bias_gelu_with_grad

            if learns:
                value, gelu_grad = matmul_bias_gelu_with_grad(y, weight, bias, tanh)
                kept = gelu_grad, value
            else:
                value, kept = matmul_bias_gelu(y, weight, bias, tanh), ()
        else:
            hidden = ctx.up(y)
            value = (gelu_fp8 if eight else gelu)(hidden, bias, tanh, seed, rate)
            kept = hidden, bias, seed
        if learns:
            ctx.save_for_backward(y, scale, shift, up_weight, *kept)
        ctx.tanh, ctx.rate = tanh, rate
        return ctx.down(value)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dbranch: Tensor) -> Any:
        y, scale, shift, weight, *kept = ctx.saved_tensors
        needs, dtype = ctx.needs_input_grad, weight.dtype
        if ctx.in_products:
            from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward

            gelu_grad, value = kept
            dhidden, dbias = matmul_gelu_backward(dbranch, ctx.down.weight, gelu_grad)
        else:
            hidden, bias, seed = kept
            dhidden, dbias, value = gelu_backward(hidden, bias, ctx.down.back(dbranch), ctx.tanh, seed, ctx.rate)
        ddown = weight_gradient(dbranch, value, dtype) if needs[5] else None
        del value
        dentering: tuple[Tensor | None, ...] = None, None, None
        if any(needs[1:4]):
            dentering = unfold_norm(weight_gradient(dhidden, y, dtype), dbias, weight, scale, shift)
        dweight, dscale, dshift = dentering
        return ctx.up.back(dhidden), dscale, dshift, dweight, dbias.to(dtype), ddown, None, None, None, None, None, None


class Product(torch.autograd.Function):
    """x Wᵀ + b alone, for tokens as in the branches."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None, eight: bool
    ) -> Tensor:
        folded, added = fold_norm(weight, bias, scale, shift, x.dtype)
        ctx.linear = (Fp8Linear if eight else Bf16Linear)(folded, x.dtype)
        ctx.save_for_backward(x, scale, shift, weight)
        return ctx.linear(x, None if added is None else added.to(x.dtype))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (x, scale, shift, weight), needs, slope = ctx.saved_tensors, ctx.needs_input_grad, slope.contiguous()
        dentering: tuple[Tensor | None, ...] = None, None, None
        dbias = slope.flatten(0, -2).sum(0, dtype=torch.float32).to(weight.dtype) if needs[4] or scale is not None else None
        if any(needs[1:4]):
            dentering = unfold_norm(weight_gradient(slope, x, weight.dtype), dbias, weight, scale, shift)
        dweight, dscale, dshift = dentering
        return ctx.linear.back(slope), dscale, dshift, dweight, dbias if needs[4] else None, None


def weight_gradient(dout: Tensor, entered: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ over rows of dout ⊗ entered, summed in float32 and returned in the weight's precision."""
    left, right = dout.flatten(0, -2).t(), entered.flatten(0, -2)
    if is_fake(dout):
        return torch.empty(left.shape[0], right.shape[1], dtype=dtype, device=dout.device)
    if dout.is_cuda and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(dtype)


def residual_norm(x, branch, bias, keep, seed, rate, eps, dtype):
    from vitrail.models.fused.residual_norm import ResidualNorm

    return ResidualNorm.apply(x, branch, bias, keep, seed, rate, eps, dtype)


def attention_branch(
    y, norm_weight, norm_bias, qkv_weight, qkv_bias, out_weight, heads, num_queries, *, fp8, recompute_cheap, needs_grad, refold
):
    return AttentionBranch.apply(
        y, norm_weight, norm_bias, qkv_weight, qkv_bias, out_weight, heads, num_queries, fp8, recompute_cheap, needs_grad
    )


def mlp_branch(
    y, norm_weight, norm_bias, up_weight, up_bias, down_weight, tanh, seed, rate, *, fp8, recompute_cheap, needs_grad, refold
):
    return MlpBranch.apply(
        y, norm_weight, norm_bias, up_weight, up_bias, down_weight, tanh, seed, rate, fp8, recompute_cheap, needs_grad
    )


def linear(y, norm_weight, norm_bias, weight, bias, *, fp8, refold):
    return Product.apply(y, norm_weight, norm_bias, weight, bias, fp8)


def add_prefix_and_positions(patches, fixed):
    from vitrail.models.fused.prefix_positions import PrefixPositions

    return PrefixPositions.apply(patches, fixed)


def patchify(images, patch, dtype):
    from vitrail.models.fused import patchify as module

    return module.patchify(images, patch, dtype)
