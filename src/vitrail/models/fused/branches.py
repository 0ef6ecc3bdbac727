"""The two branches of an encoder block, each one autograd function: cuBLAS's matmuls, and everything around them fused.

Both take tokens with mean 0 and standard deviation 1, and the weight and bias of their norm (None if it has none). Their own last
bias is left out: it is added with the residual. Weight gradients are accumulated in float32 and returned in the weight's precision.

Every tensor that backward reads goes through `save_for_backward`, the parameters included: torch then raises if one was changed in
place in between. Options of the branches:
    fp8              matmuls in fp8, where the shapes allow it
    recompute_cheap  save matmul outputs only; attention and GELU are computed again in backward
    needs_grad       whether gradients are on; what only backward reads is computed only if an input needs one
    refold           do not save folded and cast weights, but make them again in backward (FSDP2 frees weights in between)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.attention_backward import attention_backward
from vitrail.models.fused.attention_forward import attention_forward
from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.fold_norm import fold_norm, unfold_norm
from vitrail.models.fused.fp8 import Bf16Linear, Fp8Linear, Fp8Tensor
from vitrail.models.fused.gelu import gelu, gelu_backward, gelu_fp8
from vitrail.models.fused.ops import matmul_flops, once_differentiable, op
from vitrail.models.fused.selection import use_hopper_attention, use_own_matmul


def attention_branch(
    y: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, qkv_weight: Tensor, qkv_bias: Tensor | None,
    out_weight: Tensor, heads: int, num_queries: int | None, qk_norms: Sequence[Tensor] = (), eps: float = 0.0,
    *, fp8: bool, recompute_cheap: bool, needs_grad: bool, refold: bool,
) -> Tensor:  # fmt: skip
    """Return the attention branch's output for normalised tokens, without the output projection's bias.

    `num_queries`: compute only that many of the first tokens, from all of them; None: all. `qk_norms`: weight and bias of the
    norm of each head's queries, then of the keys'; empty: none.
    """
    return _AttentionBranch.apply(  # type: ignore[no-any-return]
        y, norm_weight, norm_bias, qkv_weight, qkv_bias, out_weight,
        heads, num_queries, fp8, recompute_cheap, needs_grad, refold, eps, *qk_norms,
    )  # fmt: skip


def mlp_branch(
    y: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None,
    down_weight: Tensor, tanh: bool, seed: Tensor | None, rate: float,
    *, fp8: bool, recompute_cheap: bool, needs_grad: bool, refold: bool,
) -> Tensor:  # fmt: skip
    """Return the MLP's output for normalised tokens, without the last bias.

    `tanh`: GELU's tanh form instead of erf. `seed` is that of the dropout after GELU with `rate`, or None.
    """
    return _MlpBranch.apply(  # type: ignore[no-any-return]
        y, norm_weight, norm_bias, up_weight, up_bias, down_weight, tanh, seed, rate, fp8, recompute_cheap, needs_grad, refold
    )


def linear(
    y: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
    *, fp8: bool, refold: bool,
) -> Tensor:  # fmt: skip
    """Return y Wᵀ + b alone, with a norm as in the branches."""
    return _Linear.apply(y, norm_weight, norm_bias, weight, bias, fp8, refold)  # type: ignore[no-any-return]


class _AttentionBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, qkv_weight: Tensor, qkv_bias: Tensor | None,
        out_weight: Tensor, heads: int, num_queries: int | None, fp8: bool, recompute_cheap: bool, needs_grad: bool, refold: bool,
        eps: float, *qk_norms: Tensor,
    ) -> Tensor:  # fmt: skip
        needs_grad = needs_grad and any(ctx.needs_input_grad)  # not in frozen blocks before all that is trained
        layer = Fp8Linear if fp8 and num_queries is None else Bf16Linear
        weight, bias = fold_norm(qkv_weight, qkv_bias, norm_weight, norm_bias, y.dtype)
        qkv_layer, out_layer = layer(weight, y.dtype), layer(out_weight, y.dtype)
        bias = None if bias is None else bias.to(y.dtype)
        if num_queries is None:
            q, kv = qkv_layer(y, bias), None
        else:
            q, kv = _project(y, weight, bias, num_queries)
        out, lse = attend(q, kv, heads, needs_grad, qk_norms, eps)
        if needs_grad:
            made = (None, None) if refold else (qkv_layer.weight, out_layer.weight)
            attended = (None, None) if recompute_cheap else (out, lse)
            ctx.save_for_backward(y, norm_weight, norm_bias, qkv_weight, out_weight, *made, q, kv, *attended, *qk_norms)
        ctx.heads, ctx.layer, ctx.eps = heads, layer, eps
        return out_layer(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        y, norm_weight, norm_bias, qkv_weight, out_weight, folded, cast, q, kv, out, lse, *qk_norms = ctx.saved_tensors
        needs, dtype = ctx.needs_input_grad, qkv_weight.dtype
        if out is None:
            out, lse = attend(q, kv, ctx.heads, True, qk_norms, ctx.eps)
        dout_weight = weight_grad(grad_out, out, out_weight.dtype) if needs[5] else None
        dattended = ctx.layer(out_weight if cast is None else cast, y.dtype).grad_input(grad_out)
        dq, dkv, sums, dnorms = attention_backward(q, kv, out, dattended, lse, ctx.heads, qk_norms, ctx.eps)
        del out, dattended
        dbias = column_sum(sums, dtype)
        dqk_norms = (grad.to(norm.dtype) for grad, norm in zip(dnorms, qk_norms, strict=True))
        dweight, dnorm_weight, dnorm_bias = None, None, None
        if any(needs[1:4]):
            dfolded = weight_grad(dq, y[:, : dq.shape[1]], dtype)
            if kv is not None:
                dfolded = torch.cat([dfolded, weight_grad(dkv, y, dtype)])
            dweight, dnorm_weight, dnorm_bias = unfold_norm(dfolded, dbias, qkv_weight, norm_weight, norm_bias)
        dy = None
        if needs[0]:
            if folded is None:
                folded, _ = fold_norm(qkv_weight, None, norm_weight, norm_bias, y.dtype)
            dy = ctx.layer(folded, y.dtype).grad_input(dq) if kv is None else _project_backward(dq, dkv, folded)
        return dy, dnorm_weight, dnorm_bias, dweight, dbias if needs[4] else None, dout_weight, *(None,) * 7, *dqk_norms


def _project(y: Tensor, weight: Tensor, bias: Tensor | None, num_queries: int) -> tuple[Tensor, Tensor]:
    """Return the queries of the first tokens, and keys and values of all side by side."""
    width = y.shape[-1]
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    return F.linear(y[:, :num_queries], weight[:width], q_bias), F.linear(y, weight[width:], kv_bias)


def _project_backward(dq: Tensor, dkv: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient at the tokens before `_project`."""
    width = weight.shape[1]
    dy = dkv @ weight[width:]
    dy[:, : dq.shape[1]] += dq @ weight[:width]
    return dy


def attend(
    q: Tensor, kv: Tensor | None, heads: int, needs_grad: bool, qk_norms: Sequence[Tensor] = (), eps: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Return attention's output and, where backward needs them, the logarithms of softmax's denominators.

    Queries, keys and values are given as to `attention_forward`. The Hopper kernel multiplies what TMA has loaded, so it cannot
    normalise, and a pass before it would move more bytes than attention itself.
    """
    if kv is not None or qk_norms or not use_hopper_attention(q, heads, needs_grad):
        return attention_forward(q, kv, heads, qk_norms, eps)
    from vitrail.models.fused.hopper_attention import hopper_attention

    return hopper_attention(q, heads, needs_grad=needs_grad)


class _MlpBranch(torch.autograd.Function):
    """Where a Hopper kernel has GELU in its epilogue, GELU's value and derivative are saved. Elsewhere GELU's input is, and
    backward computes its value again."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None,
        down_weight: Tensor, tanh: bool, seed: Tensor | None, rate: float,
        fp8: bool, recompute_cheap: bool, needs_grad: bool, refold: bool,
    ) -> Tensor:  # fmt: skip
        needs_grad = needs_grad and any(ctx.needs_input_grad)
        layer = Fp8Linear if fp8 else Bf16Linear
        weight, bias = fold_norm(up_weight, up_bias, norm_weight, norm_bias, y.dtype)
        up_layer, down_layer = layer(weight, y.dtype), layer(down_weight, y.dtype)
        in_epilogue = not fp8 and seed is None and not (recompute_cheap and needs_grad) and use_own_matmul(y, len(weight), "gelu")
        value: Tensor | Fp8Tensor
        saved: tuple[Tensor | None, ...] = ()
        if in_epilogue:
            from vitrail.models.fused.hopper_matmul import matmul_bias_gelu, matmul_bias_gelu_with_grad

            bias = weight.new_zeros(len(weight)) if bias is None else bias
            if needs_grad:
                value, gelu_grad = matmul_bias_gelu_with_grad(y, weight, bias, tanh)
                saved = gelu_grad, value
            else:
                value = matmul_bias_gelu(y, weight, bias, tanh)
        else:
            hidden = up_layer(y)
            value = (gelu_fp8 if fp8 else gelu)(hidden, bias, tanh, seed, rate)
            saved = hidden, bias, seed
        if needs_grad:
            made = (None, None) if refold else (up_layer.weight, down_layer.weight)
            ctx.save_for_backward(y, norm_weight, norm_bias, up_weight, down_weight, *made, *saved)
        ctx.tanh, ctx.rate, ctx.layer, ctx.in_epilogue = tanh, rate, layer, in_epilogue
        return down_layer(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        y, norm_weight, norm_bias, up_weight, down_weight, folded, cast, *saved = ctx.saved_tensors
        needs, dtype = ctx.needs_input_grad, up_weight.dtype
        down_layer = ctx.layer(down_weight if cast is None else cast, y.dtype)
        if ctx.in_epilogue:
            from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward

            gelu_grad, value = saved
            dhidden, dbias = matmul_gelu_backward(grad_out, down_layer.weight, gelu_grad)
        else:
            hidden, bias, seed = saved
            dhidden, dbias, value = gelu_backward(hidden, bias, down_layer.grad_input(grad_out), ctx.tanh, seed, ctx.rate)
        ddown = weight_grad(grad_out, value, down_weight.dtype) if needs[5] else None
        del value
        dweight, dnorm_weight, dnorm_bias = None, None, None
        if any(needs[1:4]):
            dfolded = weight_grad(dhidden, y, dtype)
            dweight, dnorm_weight, dnorm_bias = unfold_norm(dfolded, dbias, up_weight, norm_weight, norm_bias)
        dy = None
        if needs[0]:
            if folded is None:
                folded, _ = fold_norm(up_weight, None, norm_weight, norm_bias, y.dtype)
            dy = ctx.layer(folded, y.dtype).grad_input(dhidden)
        return dy, dnorm_weight, dnorm_bias, dweight, dbias.to(dtype) if needs[4] else None, ddown, *(None,) * 7


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
        fp8: bool, refold: bool,
    ) -> Tensor:  # fmt: skip
        folded, folded_bias = fold_norm(weight, bias, norm_weight, norm_bias, y.dtype)
        layer = (Fp8Linear if fp8 else Bf16Linear)(folded, y.dtype)
        ctx.save_for_backward(y, norm_weight, norm_bias, weight, None if refold else layer.weight)
        ctx.layer = type(layer)
        return layer(y, None if folded_bias is None else folded_bias.to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        y, norm_weight, norm_bias, weight, folded = ctx.saved_tensors
        needs, dtype, grad_out = ctx.needs_input_grad, weight.dtype, grad_out.contiguous()
        dbias = None
        if needs[4] or norm_weight is not None:
            dbias = grad_out.flatten(0, -2).sum(0, dtype=torch.float32).to(dtype)
        dweight, dnorm_weight, dnorm_bias = None, None, None
        if any(needs[1:4]):
            dweight, dnorm_weight, dnorm_bias = unfold_norm(weight_grad(grad_out, y, dtype), dbias, weight, norm_weight, norm_bias)
        dy = None
        if needs[0]:
            if folded is None:
                folded, _ = fold_norm(weight, None, norm_weight, norm_bias, y.dtype)
            dy = ctx.layer(folded, y.dtype).grad_input(grad_out)
        return dy, dnorm_weight, dnorm_bias, dweight, dbias if needs[4] else None, None, None


def _empty_weight_grad(grad_out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(grad_out.shape[-1], x.shape[-1], dtype=dtype, device=x.device)


@op(
    "weight_grad(Tensor grad_out, Tensor x, ScalarType dtype) -> Tensor",
    _empty_weight_grad,
    lambda grad_out, x, *rest, **named: matmul_flops(grad_out, x[-1:]),
)
def weight_grad(grad_out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad_outᵀ x over all rows, accumulated in float32 and rounded once to `dtype`."""
    left, right = grad_out.flatten(0, -2).t(), x.flatten(0, -2)
    if x.is_cuda and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(dtype)
