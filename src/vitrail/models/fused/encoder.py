"""An encoder block in fused kernels: the same function as `Block.forward`, in fewer passes over memory.

A block's last addition is left to the next block's norm, which computes both in one pass. So what goes from block to block is a
`PendingResidual`: tokens, and a branch that is still to be added to them.

Kernels are imported where they are called, since Triton is not installed everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.models.attention import Attention, sdpa

if TYPE_CHECKING:
    from vitrail.models.layers import Mlp
    from vitrail.models.vit import Block


class PendingResidual(NamedTuple):
    """The residual stream: x, plus drop_path_scale · dropout(branch + bias) where a branch is pending.

    Holds no parameter of FSDP2's.
    """

    x: Tensor
    branch: Tensor | None = None
    bias: Tensor | None = None
    drop_path_scale: Tensor | None = None
    """Stochastic depth's factor per image."""
    seed: Tensor | None = None
    rate: float = 0.0
    """Of the dropout, where there is a seed."""
    mean: Tensor | None = None
    """Subtracted from every token [image, token] of x. Norms do not see it (`folded_block.py`)."""

    @property
    def addition(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, float]:
        """What a kernel adds up, as its first arguments."""
        return self.x, self.branch, self.bias, self.drop_path_scale, self.seed, self.rate


class BlockOptions(NamedTuple):
    """What a block needs besides tokens. Everything random is drawn beforehand, so that a block can be recomputed."""

    num_queries: int | None = None
    """Compute only so many of the first tokens, from all of them."""
    fp8: bool = False
    recompute_cheap: bool = False
    """Keep matmul outputs only: attention and GELU are computed again in the backward pass."""
    drop_path_scales: tuple[Tensor, Tensor] | None = None
    """Stochastic depth's factors per image, of the attention branch and of the MLP branch."""
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """Of the dropout after attention, after GELU, and after the MLP."""


def matmul_dtype(x: Tensor) -> torch.dtype | None:
    """Return the low precision in which matmuls run here: autocast's, or the tokens' own; None for float32."""
    dtype = torch.get_autocast_dtype(x.device.type) if uses_autocast(x) else x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def uses_autocast(x: Tensor) -> bool:
    """Tell whether autocast is on where these tokens are; the meta device has none."""
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def draw_noise(block: Block, x: Tensor) -> BlockOptions:
    """Draw what dropout and stochastic depth need, from each module's own rate and mode."""
    parts = block.__dict__["_modules"]  # as in whitelist.py: `__getattr__` is slow, and this runs for every block
    skip, attention_rate, mlp_rate = parts["skip"], _rate(parts["dropout"]), _rate(parts["mlp"].__dict__["_modules"]["dropout"])
    scales = _draw_drop_path_scales(skip.rate, x) if skip.training else None
    if not (attention_rate or mlp_rate):
        return BlockOptions(drop_path_scales=scales)
    one, two, three = torch.randint(2**62, (3,), device=x.device).unbind()
    return BlockOptions(
        drop_path_scales=scales, seeds=(one if attention_rate else None, *((two, three) if mlp_rate else (None, None)))
    )


def _draw_drop_path_scales(rate: float, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Stochastic depth's factors, 0 or 1 / (1 − rate) per image, for both branches."""
    if rate == 0.0:
        return None
    one, two = torch.empty(2, len(x), dtype=torch.float32, device=x.device).bernoulli_(1.0 - rate).div_(1.0 - rate).unbind()
    return one, two


def _rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def run_block(block: Block, pending: PendingResidual, options: BlockOptions) -> PendingResidual:
    """Run a block whose modules are plain (`whitelist.is_plain_block`)."""
    from vitrail.models.fused.folded_block import can_use_folded, folded_block
    from vitrail.models.fused.residual_norm import residual_norm
    from vitrail.models.fused.sharded import is_sharded, stays_gathered

    dtype = matmul_dtype(pending.x)
    assert dtype is not None
    if options.num_queries is None and dtype == pending.x.dtype and can_use_folded(block, pending.x):
        return folded_block(block, pending)
    sharded = is_sharded(block)
    refold = sharded and not stays_gathered(block)
    attention_scale, mlp_scale = options.drop_path_scales or (None, None)
    x, y = residual_norm(*pending.addition, block.norm1.eps, dtype)
    branch = _attention(block.attention, block.norm1, y, options, refold)
    mean = pending.mean
    if options.num_queries is not None:
        x, mean = x[:, : options.num_queries], None if mean is None else mean[:, : options.num_queries]
    attention_bias, rate = block.attention.out.bias, block.dropout.p
    x, y = residual_norm(x, branch, attention_bias, attention_scale, options.seeds[0], rate, block.norm2.eps, dtype)
    branch = _mlp(block.mlp, block.norm2, y, options, refold)
    bias: Tensor | None = block.mlp.down.bias
    if sharded and bias is not None:
        bias = bias.clone()
    return PendingResidual(x, branch, bias, mlp_scale, options.seeds[2], block.mlp.dropout.p, mean)


def settle(pending: PendingResidual) -> Tensor:
    """Return the tokens, with the pending branch and what was subtracted added."""
    from vitrail.models.fused.residual_norm import residual_norm

    x = pending.x
    if pending.branch is not None:
        x, _ = residual_norm(*pending.addition, 1.0, pending.branch.dtype)
    return x if pending.mean is None else (x + pending.mean[..., None]).to(x.dtype)


def settle_and_norm(pending: PendingResidual, norm: nn.LayerNorm) -> Tensor:
    """Return the tokens, with the pending branch added, after a layer norm: in float32 under autocast, else in their precision."""
    from vitrail.models.fused.residual_norm import residual_norm

    dtype = torch.float32 if uses_autocast(pending.x) else pending.x.dtype
    _, y = residual_norm(*pending.addition, norm.eps, dtype)
    return torch.addcmul(norm.bias.to(dtype), y, norm.weight.to(dtype))


def _attention(attention: Attention, norm: nn.LayerNorm, y: Tensor, options: BlockOptions, refold: bool) -> Tensor:
    from vitrail.models.fused.branches import attention_branch, linear
    from vitrail.models.fused.qk_norm import qk_norm
    from vitrail.models.fused.selection import suits_own_attention

    qkv, out, heads, num_queries = attention.qkv, attention.out, attention.heads, options.num_queries
    entering = y, norm.weight, norm.bias, qkv.weight, qkv.bias
    needs_grad, (norms, eps) = torch.is_grad_enabled(), qk_norms(attention)
    if suits_own_attention(y, heads, num_queries, needs_grad, bool(norms)):
        return attention_branch(
            *entering, out.weight, heads, num_queries, norms, eps,
            fp8=options.fp8, recompute_cheap=options.recompute_cheap, needs_grad=needs_grad, refold=refold,
        )  # fmt: skip
    # With many tokens attention itself is much of the cost, and torch's kernels are at their best.
    projected = linear(*entering, fp8=options.fp8, refold=refold)
    if norms:
        projected = qk_norm(projected, heads, norms, eps)
    q, k, v = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    attended = sdpa(q[:, :, :num_queries], k, v)
    fp8 = options.fp8 and num_queries is None
    return linear(attended.transpose(1, 2).flatten(2), None, None, out.weight, None, fp8=fp8, refold=refold)


def qk_norms(attention: Attention) -> tuple[tuple[Tensor, ...], float]:
    """Return weight and bias of the queries' norm, then of the keys', and their epsilon; nothing where there are none."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm is None or k_norm is None:
        return (), 0.0
    return (q_norm.weight, q_norm.bias, k_norm.weight, k_norm.bias), float(q_norm.eps)


def _mlp(mlp: Mlp, norm: nn.LayerNorm, y: Tensor, options: BlockOptions, refold: bool) -> Tensor:
    from vitrail.models.fused.branches import mlp_branch

    return mlp_branch(
        y, norm.weight, norm.bias, mlp.up.weight, mlp.up.bias, mlp.down.weight,
        mlp.approximate == "tanh", options.seeds[1], float(mlp.dropout.p),
        fp8=options.fp8, recompute_cheap=options.recompute_cheap, needs_grad=torch.is_grad_enabled(), refold=refold,
    )  # fmt: skip
