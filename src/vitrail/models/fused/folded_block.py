"""A block whose layer norms are folded into the linear layers after them, once, for inference.

A layer norm and a linear layer compute W (γ ∘ (x − mean) · rstd + β) + b. Here γ and β go into the weight and the bias once, the
mean is subtracted where the residual is written, and rstd is applied to the output:

    rstd · W' (x − mean) + b',    W' = W ∘ γ,    b' = b + W β

so that the residual itself is multiplied, and normalised tokens are not written. The residual may lose its mean because only norms
read it, which subtract the mean anyway; `PendingResidual.mean` keeps it for readers of the tokens themselves. Rounded after the
subtraction, tokens with a large mean lose nothing. The mean of every row of W' is subtracted, too, before rounding: that changes
nothing in exact arithmetic, and the mean that rounding leaves in a token is not multiplied by anything large.

Without the kernel for it, a folded block still computes the same: `FoldedNorm` normalises, and the linear layer follows.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from vitrail.models.fused.encoder import PendingResidual
    from vitrail.models.vit import Block


class FoldedNorm(nn.LayerNorm):
    """A layer norm without weight and bias: they were folded into the linear layer after it."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__(norm.normalized_shape, eps=float(norm.eps), elementwise_affine=False)


@torch.no_grad()
def fold_norms(block: Block) -> None:
    """Fold both layer norms of a block into the linear layers after them; blocks that are not exactly plain stay as they are.

    To be called before the weights are rounded. Layers that other blocks share are not changed: this block gets its own.
    """
    from vitrail.models.fused.whitelist import is_plain, is_plain_block

    if not is_plain_block(block, layer_scale=True, eval_mode=True):
        return
    attention, mlp = block.attention, block.mlp
    if is_plain(block.norm1, nn.LayerNorm):
        block.attention = _with_part(attention, "qkv", _folded(block.norm1, attention.qkv))
        block.norm1 = FoldedNorm(block.norm1).train(block.norm1.training)
    if is_plain(block.norm2, nn.LayerNorm):
        block.mlp = _with_part(mlp, "up", _folded(block.norm2, mlp.up))
        block.norm2 = FoldedNorm(block.norm2).train(block.norm2.training)


def _folded(norm: nn.LayerNorm, linear: nn.Linear) -> nn.Linear:
    """W ∘ γ with rows of mean zero, and b + W β, computed in float64."""
    weight = linear.weight.double()
    bias = weight @ norm.bias.double()
    if linear.bias is not None:
        bias += linear.bias.double()
    weight = weight * norm.weight.double()
    weight -= weight.mean(dim=1, keepdim=True)
    made = nn.Linear(linear.in_features, linear.out_features, device="meta").train(linear.training)
    made.weight = nn.Parameter(weight.to(linear.weight.dtype), requires_grad=False)
    made.bias = nn.Parameter(bias.to(linear.weight.dtype), requires_grad=False)
    return made


def _with_part(module: Any, name: str, part: nn.Module) -> Any:
    """Return a module like the given one with another part; the given one may be shared."""
    made = copy.copy(module)
    made._modules = {**module._modules, name: part}
    return made


def can_use_folded(block: Block, x: Tensor) -> bool:
    """Tell whether `folded_block` computes this block, in eval mode and without gradients, for these tokens.

    The block itself must be plain (`whitelist.is_plain_block`).
    """
    if torch.is_grad_enabled():
        return False
    parts = block.__dict__["_modules"]  # as in whitelist.py: attributes of modules are slow to read
    if type(parts["norm1"]) is not FoldedNorm or type(parts["norm2"]) is not FoldedNorm:
        return False
    attention, mlp = parts["attention"], parts["mlp"]
    modules, mlp_modules = attention.__dict__["_modules"], mlp.__dict__["_modules"]
    if (
        block.training
        or attention.training
        or parts["skip"].training
        or parts["dropout"].training
        or mlp_modules["dropout"].training
    ):
        return False
    if type(parts["scale1"]) is not nn.Identity or type(parts["scale2"]) is not nn.Identity:
        return False
    qkv, up = modules["qkv"].__dict__["_parameters"], mlp_modules["up"].__dict__["_parameters"]
    dtype = x.dtype
    if qkv["weight"].dtype != dtype or up["weight"].dtype != dtype or qkv["bias"] is None or up["bias"] is None:
        return False
    from vitrail.models.fused.selection import suits_own_attention, use_norm_epilogue

    suits = use_norm_epilogue(x, qkv["weight"].shape[0], up["weight"].shape[0])
    return suits and suits_own_attention(x, attention.heads, None, False, "q_norm" in modules)


def folded_block(block: Block, pending: PendingResidual) -> PendingResidual:
    """Compute a block whose norms are folded, in no more passes over memory than there are matmuls, attention and two additions."""
    from vitrail.models.fused.branches import attend
    from vitrail.models.fused.encoder import qk_norms
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu
    from vitrail.models.fused.residual_norm import residual_centred

    attention, mlp = block.attention, block.mlp
    qkv, out, up, down = attention.qkv, attention.out, mlp.up, mlp.down
    x, rstd, mean = residual_centred(*pending.addition, block.norm1.eps, pending.mean)
    projected = matmul_bias(x, qkv.weight, qkv.bias, rstd)
    values, _ = attend(projected, None, attention.heads, False, *qk_norms(attention))
    x, rstd, mean = residual_centred(x, F.linear(values, out.weight), out.bias, None, None, 0.0, block.norm2.eps, mean)
    hidden = matmul_bias_gelu(x, up.weight, up.bias, mlp.approximate == "tanh", rstd)
    return type(pending)(x, F.linear(hidden, down.weight), down.bias, mean=mean)
