"""A row of encoder blocks on a GPU, fused: the same function as the plain blocks, in fewer passes over memory.

A block's last addition waits until the next block's norm, which is computed in the same pass; so between blocks the stream is a
pair, what has been added up and what is still to be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from vitrail.models.attention import KERNELS, Attention
from vitrail.models.fused.folded_norm import can_use_folded, folded_block
from vitrail.models.fused.launch import has_triton, is_fake
from vitrail.models.fused.self_test import attention_works, works
from vitrail.models.recomputing import Recomputing

if TYPE_CHECKING:
    from vitrail.models.vit import Block


class Stream(NamedTuple):
    """The residual stream: x, plus keep · dropout(branch + bias) where a branch is waiting."""

    x: Tensor
    branch: Tensor | None = None
    bias: Tensor | None = None
    keep: Tensor | None = None
    """Stochastic depth's factor for each image."""
    seed: Tensor | None = None
    rate: float = 0.0
    """Of the dropout, where there is a seed."""


def low_precision(x: Tensor) -> torch.dtype | None:
    """The precision products run in here: autocast's, or the tokens' own; None for float32."""
    device = "cuda" if x.is_cuda else "cpu"
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def can_fuse(x: Tensor) -> bool:
    """Whether the fused path can run where these tokens are, and in their precision."""
    dtype = low_precision(x)
    if not (x.is_cuda or is_fake(x)) or dtype is None or torch.compiler.is_compiling() or not has_triton():
        return False
    return is_fake(x) or works(x.device, dtype)


def is_heard(module: nn.Module) -> bool:
    """Whether somebody listens to it, an engine for shards or a person: then it is called as ever, with what it has always got."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def is_plain(block: Block) -> bool:
    """Whether the fused path computes what this block does, as it is now."""
    if any(is_heard(one) for one in block.modules()):
        return False
    dropping = block.training and block.attention.dropout > 0
    linear = all(type(one) is nn.Linear for one in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down))
    return linear and type(block.attention) is Attention and type(block.scale1) is nn.Identity and not dropping


def run_blocks(
    blocks: Sequence[Block], x: Tensor, *, recomputing: Recomputing | None = None, first: int | None = None, eight: bool = False
) -> Stream:
    """All blocks. With `first` the last one computes only that many tokens, from all of them. With `eight` products that allow it
    are those of eight-bit floats."""
    recomputing = recomputing or Recomputing()
    stream, seeds = Stream(x), _seeds(blocks, x)
    for number, block in enumerate(blocks):
        few = first if number == len(blocks) - 1 else None
        light = recomputing.keeps == "products" and number < recomputing.blocks
        if light:  # the branches themselves keep products only
            stream = _block(block, stream, few, seeds[number], eight, light)
            continue
        draws = block.training and block.skip.rate > 0  # dropout has its seeds, and needs no generator's state
        stream = recomputing.run(number, _block, block, stream, few, seeds[number], eight, draws=draws)
    return stream


def _seeds(blocks: Sequence[Block], x: Tensor) -> Sequence[Sequence[Tensor | None]]:
    """For each block the seeds of its three dropouts: after attention, after GELU, after the MLP."""
    if not any(block.training and block.dropout.p > 0 for block in blocks):
        return [(None, None, None)] * len(blocks)
    drawn = torch.randint(2**62, (len(blocks), 3), device=x.device)
    return [list(row) for row in drawn]


def _block(
    block: Block, stream: Stream, first: int | None, seeds: Sequence[Tensor | None], eight: bool, light: bool = False
) -> Stream:
    dtype = low_precision(stream.x)
    assert dtype is not None
    if first is None and dtype == stream.x.dtype and can_use_folded(block, stream.x):
        return folded_block(block, stream)
    x, y = _added(stream, block.norm1.eps, dtype)
    branch = _attended(block.attention, block.norm1, y, first, eight, light)
    x, rate = x if first is None else x[:, :first], block.dropout.p
    after_attention, after_gelu, after_mlp = seeds if block.training and rate > 0 else (None, None, None)
    x, y = _added(Stream(x, branch, block.attention.out.bias, _keep(block, x), after_attention, rate), block.norm2.eps, dtype)
    branch = _mlp(block.mlp, block.norm2, y, after_gelu, rate, eight, light)
    return Stream(x, branch, block.mlp.down.bias, _keep(block, x), after_mlp, rate)


def cut_for(images: Tensor, patch: tuple[int, int], weight: Tensor) -> Tensor:
    """Images cut into patches, in the precision in which they will be multiplied with the weight."""
    from vitrail.models.fused.patchify import patchify

    dtype = low_precision(weight)
    assert dtype is not None
    return patchify(images, patch, dtype)


def assembled(patches: Tensor, fixed: Tensor) -> Tensor:
    """What all images share [1, token, width], with the patches [image, patch, width] added to its last tokens."""
    from vitrail.models.fused.prefix_positions import PrefixPositions

    return PrefixPositions.apply(patches, fixed[0])  # type: ignore[no-any-return]


def add_norm(stream: Stream, norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The stream added up, and normed in the given precision."""
    x, y = _added(stream, norm.eps, dtype)
    return x, torch.addcmul(norm.bias.to(dtype), y, norm.weight.to(dtype))


def _added(stream: Stream, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The stream added up, and with mean 0 and deviation 1: a norm's weights are left to what comes next."""
    from vitrail.models.fused.residual_norm import ResidualNorm

    return ResidualNorm.apply(*stream, eps, dtype)  # type: ignore[no-any-return]


def _attended(attention: Attention, norm: nn.LayerNorm, y: Tensor, first: int | None, eight: bool, light: bool) -> Tensor:
    from vitrail.models.fused.branches import AttentionBranch, Product

    entering, out = (norm.weight, norm.bias, attention.qkv.weight, attention.qkv.bias), attention.out
    if _own_attention(y, attention.heads, first):
        learns = torch.is_grad_enabled()
        return AttentionBranch.apply(y, *entering, out.weight, attention.heads, first, eight, light, learns)  # type: ignore[no-any-return]
    # With many tokens attention itself is much of the cost, and the library's kernels are at their best.
    both = Product.apply(y, *entering, eight)
    q, k, v = both.unflatten(-1, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    with sdpa_kernel(KERNELS):
        attended = F.scaled_dot_product_attention(q if first is None else q[:, :, :first], k, v)
    return Product.apply(attended.transpose(1, 2).flatten(2), None, None, out.weight, None, eight and first is None)  # type: ignore[no-any-return]


def _own_attention(y: Tensor, heads: int, first: int | None) -> bool:
    """Whether our own kernels have room for so many tokens, and are right for them."""
    from vitrail.models.fused.attention_backward import fits

    keys, channels = y.shape[1], y.shape[2] // heads
    if not fits(keys, channels, y.device):
        return False
    return is_fake(y) or attention_works(y.device, y.dtype, first or keys, keys, heads, channels, torch.is_grad_enabled())


def _mlp(mlp: Any, norm: nn.LayerNorm, y: Tensor, seed: Tensor | None, rate: float, eight: bool, light: bool) -> Tensor:
    from vitrail.models.fused.branches import MlpBranch

    weights = norm.weight, norm.bias, mlp.up.weight, mlp.up.bias, mlp.down.weight
    tanh, learns = mlp.approximate == "tanh", torch.is_grad_enabled()
    return MlpBranch.apply(y, *weights, tanh, seed, rate, eight, light, learns)  # type: ignore[no-any-return]


def _keep(block: Block, x: Tensor) -> Tensor | None:
    """Stochastic depth's factor for each image."""
    rate = block.skip.rate
    if not block.training or rate == 0.0:
        return None
    return torch.empty(len(x), device=x.device).bernoulli_(1.0 - rate) / (1.0 - rate)
