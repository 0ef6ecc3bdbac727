"""What the self-test compares: the error of kernels against torch, for small inputs that reach every path.

The error of the worst row counts (a token's values in one head, say), not one norm over everything, in which a single wrong head
or last row would vanish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FP8_TOLERANCE = 0.4  # relative error of a row with fp8's three mantissa bits
_NOISE = 0.02  # relative error of a row that is always allowed; beyond it, twice that of torch's own kernels
_RATE = 0.3  # of dropout, where it is tested
_EPS = 1e-6
_IMAGES, _TOKENS = 3, 17


class _Weights(NamedTuple):
    """The parameters of a block."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor
    qk_norms: tuple[Tensor, ...]
    """Weight and bias of the norm of each head's queries, then of the keys'."""


def blocks_difference(
    device: torch.device, dtype: torch.dtype, width: int, mlp: int, heads: int, tanh: bool,
    *, fp8: bool = False, qk_norm: bool = False,
) -> float:  # fmt: skip
    """Return the worst row's error of two blocks' output and gradients, if it is larger than allowed; else 0.

    The second block computes one token only, as the last block of a classifier does.
    """
    attention_shapes: tuple[tuple[int, ...], ...] = ((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,))
    shapes = (*attention_shapes, (width,), (width,), (mlp, width), (mlp,), (width, mlp), (width,))
    blocks = []
    for _ in range(2):
        drawn = [_random(shape, device) for shape in (*shapes, *([(width // heads,)] * 4 if qk_norm else []))]
        blocks.append(_Weights._make((*drawn[:12], tuple(drawn[12:]))))
    x = torch.randn(_IMAGES, _TOKENS, width, device=device, dtype=torch.float32, requires_grad=True)
    grad_out = torch.randn(_IMAGES, 1, width, device=device, dtype=torch.float32)
    norms = [one for block in blocks for one in block.qk_norms]
    leaves = [*norms, x, *(one for block in blocks for one in block[:-1])]
    worst = 0.0
    for drops in (False, True):
        seeds = torch.randint(2**62, (2, 3), device=device) if drops else None
        drop_path_scale = torch.arange(_IMAGES, device=device, dtype=torch.float32) % 3 if drops else None
        masks = [_masks(seeds, number, drop_path_scale, tokens, width, mlp) for number, tokens in enumerate((_TOKENS, 1))]

        def plain(precision: torch.dtype, masks: list[list[Tensor | float]] = masks) -> Tensor:
            middle = _plain_block(x, blocks[0], heads, _TOKENS, tanh, masks[0], precision)
            return _plain_block(middle, blocks[1], heads, 1, tanh, masks[1], precision)

        exact, rounded = plain(torch.float32), plain(dtype)
        fused = _fused_blocks(x, blocks, heads, tanh, seeds, drop_path_scale, dtype, fp8)
        results = []
        for out in (exact, rounded, fused):
            gradients = torch.autograd.grad(out, leaves, grad_out)
            # Those of the norms together: the keys' bias has no effect, so its gradient alone would be rounding errors.
            results.append([out, *([torch.stack(gradients[: len(norms)])] if norms else []), *gradients[len(norms) :]])
        for expected, theirs, ours in zip(*results, strict=True):
            error, noise = (worst_row(expected, one, width // heads) for one in (ours, theirs))
            if error > (_FP8_TOLERANCE if fp8 else max(2 * noise, _NOISE)):
                worst = max(worst, error)
    return worst


def _random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return weights that keep the size of what they are multiplied with, norm weights near one, and biases."""
    values = torch.randn(shape, device=device, dtype=torch.float32)  # whatever torch's default is
    return (values / math.sqrt(shape[1]) if len(shape) == 2 else 0.5 + 0.2 * values).requires_grad_()


def _masks(
    seeds: Tensor | None, block: int, drop_path_scale: Tensor | None, tokens: int, width: int, mlp: int
) -> list[Tensor | float]:
    """Return the factors of a block's three dropouts, of stochastic depth as well after attention and the MLP."""
    if seeds is None or drop_path_scale is None:
        return [1.0, 1.0, 1.0]
    from vitrail.models.fused.residual_norm import residual_norm

    masks: list[Tensor | float] = []
    for seed, size in zip(seeds[block], (width, mlp, width), strict=True):
        ones = torch.ones(len(drop_path_scale), tokens, size, device=seeds.device, dtype=torch.float32)
        mask, _ = residual_norm(torch.zeros_like(ones), ones, None, None, seed, _RATE, _EPS, torch.float32)
        dropped = float((mask == 0).float().mean())
        if abs(dropped - _RATE) > 6 * math.sqrt(_RATE * (1 - _RATE) / mask.numel()):
            raise ValueError(f"dropout drops {dropped:.1%} of the values instead of {_RATE:.0%}")
        masks.append(mask if size == mlp and len(masks) == 1 else mask * drop_path_scale[:, None, None])
    return masks


def _plain_block(
    x: Tensor, w: _Weights, heads: int, num_queries: int, tanh: bool, masks: Sequence[Tensor | float], dtype: torch.dtype
) -> Tensor:
    """Compute a block as torch does under autocast to `dtype`."""

    def linear(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(y.to(dtype), weight.to(dtype), bias.to(dtype))

    shape = x.shape[-1:]
    qkv = linear(F.layer_norm(x, shape, w.norm1_weight, w.norm1_bias, _EPS), w.qkv_weight, w.qkv_bias)
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    if w.qk_norms:
        q, k = _head_norms(q, k, w.qk_norms)
    values = F.scaled_dot_product_attention(q[:, :, :num_queries], k, v).transpose(1, 2).flatten(2)
    x = x[:, :num_queries] + masks[0] * linear(values, w.out_weight, w.out_bias).float()
    hidden = linear(F.layer_norm(x, shape, w.norm2_weight, w.norm2_bias, _EPS), w.up_weight, w.up_bias)
    hidden = F.gelu(hidden, approximate="tanh" if tanh else "none") * masks[1]
    return x + masks[2] * linear(hidden, w.down_weight, w.down_bias).float()


def _head_norms(q: Tensor, k: Tensor, norms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return queries and keys [..., channel] after their layer norms, computed in float32."""
    q_weight, q_bias, k_weight, k_bias = norms
    shape = q.shape[-1:]
    q_normed = F.layer_norm(q.float(), shape, q_weight, q_bias, _EPS)
    return q_normed.to(q.dtype), F.layer_norm(k.float(), shape, k_weight, k_bias, _EPS).to(k.dtype)


def _fused_blocks(
    x: Tensor, blocks: Sequence[_Weights], heads: int, tanh: bool, seeds: Tensor | None, drop_path_scale: Tensor | None,
    dtype: torch.dtype, fp8: bool,
) -> Tensor:  # fmt: skip
    from vitrail.models.fused.attention_backward import fits
    from vitrail.models.fused.branches import attention_branch, linear, mlp_branch
    from vitrail.models.fused.qk_norm import qk_norm
    from vitrail.models.fused.residual_norm import residual_norm

    branch, bias, seed, tokens = None, None, None, x.shape[1]
    for number, w in enumerate(blocks):
        drawn: Sequence[Tensor | None] = (None, None, None) if seeds is None else seeds[number].unbind(0)
        num_queries = 1 if number == len(blocks) - 1 else None
        x, y = residual_norm(x, branch, bias, None if branch is None else drop_path_scale, seed, _RATE, _EPS, dtype)
        norm_and_qkv = w.norm1_weight, w.norm1_bias, w.qkv_weight, w.qkv_bias
        if fits(tokens, x.shape[-1] // heads, x.device):
            branch = attention_branch(
                y, *norm_and_qkv, w.out_weight, heads, num_queries, w.qk_norms, _EPS,
                fp8=fp8, recompute_cheap=False, needs_grad=True, refold=False,
            )  # fmt: skip
        else:
            qkv = linear(y, *norm_and_qkv, fp8=fp8, refold=False)
            qkv = qk_norm(qkv, heads, w.qk_norms, _EPS) if w.qk_norms else qkv
            q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            values = F.scaled_dot_product_attention(q[:, :, :num_queries], k, v).transpose(1, 2).flatten(2)
            branch = linear(values, None, None, w.out_weight, None, fp8=fp8 and num_queries is None, refold=False)
        x, y = residual_norm(x[:, :num_queries], branch, w.out_bias, drop_path_scale, drawn[0], _RATE, _EPS, dtype)
        weights = w.norm2_weight, w.norm2_bias, w.up_weight, w.up_bias, w.down_weight
        branch = mlp_branch(y, *weights, tanh, drawn[1], _RATE, fp8=fp8, recompute_cheap=False, needs_grad=True, refold=False)
        bias, seed = w.down_bias, drawn[2]
    return residual_norm(x, branch, bias, drop_path_scale, seed, _RATE, _EPS, dtype)[0]


def attention_difference(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, heads: int, channels: int, needs_grad: bool, qk_norm: bool
) -> float:
    """Laid out as in the encoder: all side by side or, with fewer queries than keys, the queries in a tensor of their own."""
    from vitrail.models.fused.attention_backward import attention_backward
    from vitrail.models.fused.attention_forward import attention_forward, split_qkv

    width = heads * channels
    q = torch.randn(3, queries, width if queries < keys else 3 * width, device=device).to(dtype)
    kv = torch.randn(3, keys, 2 * width, device=device).to(dtype) if queries < keys else None
    leaves = [one.detach().float().requires_grad_() for one in split_qkv(q, kv)]
    in_heads = [one.unflatten(-1, (heads, channels)).transpose(1, 2) for one in leaves]
    norms = tuple(_random((channels,), device) for _ in range(4 if qk_norm else 0))
    if norms:
        in_heads[:2] = _head_norms(in_heads[0], in_heads[1], norms)
    scores = in_heads[0] @ in_heads[1].transpose(-2, -1) * channels**-0.5
    plain = (scores.softmax(-1) @ in_heads[2]).transpose(1, 2).flatten(2)
    per_tile, _ = attention_forward(q, kv, heads, norms, _EPS, False)
    fused, lse = attention_forward(q, kv, heads, norms, _EPS, True)
    worst = largest_difference([plain, plain], [per_tile, fused], channels)
    if not needs_grad:
        return worst
    grad_out = torch.randn_like(plain).to(dtype)
    dq, dkv, _, dnorms = attention_backward(q, kv, fused, grad_out, lse, heads, norms, _EPS)
    expected, found = torch.autograd.grad(plain, [*leaves, *norms], grad_out.float()), split_qkv(dq, None if kv is None else dkv)
    start = 2 if keys == 1 else 0  # with one key the gradients of queries and keys are zero, and rounding errors all there is
    if norms and keys > 1:
        worst = max(worst, largest_difference([torch.stack(expected[3:])], [dnorms]))
    return max(worst, largest_difference(expected[start:3], found[start:], channels))


def patchify_difference(device: torch.device, dtype: torch.dtype) -> float:
    from vitrail.models.fused.patchify import patchify

    images = torch.randn(2, 3, 28, 42, device=device, dtype=torch.float32)
    expected = images.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 1, 4, 5).reshape(2, 6, -1)
    return largest_difference([expected], [patchify(images, (14, 14), dtype)])


def prefix_difference(device: torch.device, dtype: torch.dtype) -> float:
    from vitrail.models.fused.prefix_positions import add_prefix_and_positions

    patches = torch.randn(20, 6, 192, device=device).to(dtype).requires_grad_()
    fixed = torch.randn(8, 192, device=device, dtype=torch.float32)
    leaves = patches, fixed.requires_grad_()
    plain, fused = fixed + F.pad(patches.float(), (0, 0, 2, 0)), add_prefix_and_positions(patches, fixed)
    grad_out = torch.randn_like(plain)
    expected, found = ([out, *torch.autograd.grad(out, leaves, grad_out)] for out in (plain, fused))
    return largest_difference(expected, found)


def loss_difference(device: torch.device, dtype: torch.dtype) -> float:
    from vitrail.models.fused.cross_entropy import CrossEntropy

    logits = torch.randn(5, 12, device=device).to(dtype).requires_grad_()
    targets = torch.arange(5, device=device)
    plain, fused = F.cross_entropy(logits.float(), targets, reduction="none"), CrossEntropy.apply(logits, targets)
    expected, found = ([out[:, None], *torch.autograd.grad(out.sum(), logits)] for out in (plain, fused))
    return largest_difference(expected, found)


def largest_difference(expected: Sequence[Tensor], found: Sequence[Tensor], size: int | None = None) -> float:
    """Return the `worst_row` of all pairs."""
    return max(worst_row(one, two, size) for one, two in zip(expected, found, strict=True))


def worst_row(expected: Tensor, found: Tensor, size: int | None = None) -> float:
    """Return the largest relative error of a row; infinite if anything is not finite.

    A row is `size` values that follow each other (a head's, say), where the last axis divides into such; default: the last axis.
    Errors are relative to the row, or to the typical row if that is larger: rows that are nearly zero hold rounding errors only.
    """
    length = expected.shape[-1]
    length = size if size and length % size == 0 else length
    one, two = (tensor.detach().float().reshape(-1, length) for tensor in (expected, found))
    norms = one.norm(dim=1)
    typical = float(norms.square().mean().sqrt())
    worst = float(((two - one).norm(dim=1) / norms.clamp(min=max(typical, 1e-30))).max())
    return worst if math.isfinite(worst) else math.inf  # a NaN would compare as neither more nor less
