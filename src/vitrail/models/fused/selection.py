"""Whether a kernel for Hopper GPUs is the better one: asked before each use, answered by shape and by a trial."""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.launch import is_fake, num_sms, sm_major
from vitrail.models.fused.self_test import largest_difference, passes

_TOLERANCE = 0.01  # relative, of what the kernels compute: a few times what rounding to low precision does


def use_own_matmul(x: Tensor, columns: int, end: Literal["bias", "gelu"]) -> bool:
    """Whether our own kernels are for x [..., inner] times a weight with so many columns, and right on this device.

    With GELU in the end they are faster than the library and a pass, but for two to four images, where there is little between
    them; with a bias where there are many rows. Without either the library is: its larger tiles need less power.
    """
    inner, rows = x.shape[-1], x.numel() // x.shape[-1]
    if x.dtype not in (torch.bfloat16, torch.float16) or columns % 128 or inner % 64 or rows < 64:
        return False
    if is_fake(x):  # a Hopper GPU is planned for
        return True
    enough = end == "gelu" or rows * columns >= 8 * 128 * 128 * num_sms(x.device)
    return x.is_cuda and enough and _works(x.device, x.dtype)


def use_norm_epilogue(x: Tensor, biased: int, gelu: int) -> bool:
    """Whether products with so many columns, with a bias and with GELU, are for our own kernels, and take factors rightly."""
    return (
        use_own_matmul(x, biased, "bias")
        and use_own_matmul(x, gelu, "gelu")
        and (is_fake(x) or _norm_epilogue_works(x.device, x.dtype))
    )


@functools.cache
def _norm_epilogue_works(device: torch.device, dtype: torch.dtype) -> bool:
    otherwise = "Norms are not left to products here (%s); going on a little more slowly."
    return passes(device, _TOLERANCE, lambda: _norm_epilogue_difference(device, dtype), otherwise)


def _norm_epilogue_difference(device: torch.device, dtype: torch.dtype) -> float:
    """How far off matmuls with a layer norm in their epilogue are."""
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu
    from vitrail.models.fused.residual_norm import residual_stats

    generator, sizes = torch.Generator(device).manual_seed(0), ((1, 40_037, 192), (1, 40_037, 192), (256, 192), (256,), (192,))
    x, branch, weight, bias, added = (torch.randn(size, device=device, generator=generator) / 4 for size in sizes)
    exact = F.linear(F.layer_norm(x + branch + added, (192,)), weight, bias)
    total, mean, rstd = residual_stats(x.to(dtype), branch.to(dtype), added.to(dtype), None, None, 0.0, 1e-6)
    weight = weight.to(dtype)
    norm = mean, rstd, weight.sum(1, dtype=torch.float32)
    found = matmul_bias(total, weight, bias, *norm), matmul_bias_gelu(total, weight, bias, False, *norm)
    return largest_difference([exact, F.gelu(exact)], found)


def use_hopper_attention(qkv: Tensor, heads: int, learns: bool) -> bool:
    """Whether attention over queries, keys and values [image, token, 3 · width] is for `hopper_attention.py`, and right there.

    It is for heads of the width that the paper has, more of them than multiprocessors, over so many tokens that there are tiles
    for all groups.
    """
    images, tokens, width = *qkv.shape[:2], qkv.shape[2] // 3
    if qkv.dtype not in (torch.bfloat16, torch.float16) or width != 64 * heads or not 128 < tokens <= 224 or is_fake(qkv):
        return False
    many = qkv.is_cuda and images * heads >= 1.5 * num_sms(qkv.device)
    return many and _hopper_attention_works(qkv.device, qkv.dtype, tokens, heads, learns)


@functools.cache
def _hopper_attention_works(device: torch.device, dtype: torch.dtype, tokens: int, heads: int, learns: bool) -> bool:
    """Whether the device has what that kernel is made for, and it is right for so many tokens: each number is compiled anew."""
    otherwise = f"The fastest kernel for attention over {tokens} tokens is not used here (%s); going on with another, more slowly."
    given = device, dtype, tokens, heads, learns
    return sm_major(device) == 9 and passes(device, _TOLERANCE, lambda: _hopper_attention_difference(*given), otherwise)


def _hopper_attention_difference(device: torch.device, dtype: torch.dtype, tokens: int, heads: int, learns: bool) -> float:
    """How far off the output and softmax's denominators are; each program gets several heads."""
    from vitrail.models.fused.hopper_attention import hopper_attention

    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(3, tokens, 3 * 64 * heads, device=device, generator=generator).to(dtype)
    q, k, v = qkv.float().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1) / 8
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    out, lse = hopper_attention(qkv, heads, needs_grad=learns, programs=max(1, 3 * heads // 7))
    off = largest_difference([expected], [out])
    return off if not learns else max(off, largest_difference([scores.logsumexp(-1)], [lse]))


@functools.cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has what the kernels are made for, and they compute the right thing there."""
    otherwise = "Vitrail's own products are not used here (%s); going on with torch's, more slowly."
    return sm_major(device) == 9 and passes(device, _TOLERANCE, lambda: _difference(device, dtype), otherwise)


def _difference(device: torch.device, dtype: torch.dtype) -> float:
    """How far off products, GELU's value, derivative and gradient are, relative to their size.

    Each program gets several tiles, and those at the edge are not full; or there are so few rows that tiles are lower.
    """
    from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu, matmul_bias_gelu_with_grad

    generator, sizes = torch.Generator(device).manual_seed(0), ((40_037, 192), (256, 192), (256,), (192, 256))
    y, up, bias, down = (torch.randn(size, device=device, generator=generator).to(dtype) / 4 for size in sizes)
    again, gelu_grad = matmul_bias_gelu_with_grad(y, up, bias, False)
    found = [matmul_bias(y, up, bias), matmul_bias_gelu(y[:150], up, bias, False), matmul_bias_gelu(y, up, bias, False)]
    found += [again, gelu_grad, *matmul_gelu_backward(y, down, gelu_grad)]
    entering = F.linear(y.float(), up.float(), bias.float()).requires_grad_()
    value = F.gelu(entering)
    (derivative,) = torch.autograd.grad(value.sum(), entering)
    gradient = (y.float() @ down.float()) * derivative
    expected = [entering, value[:150], value, value, derivative, gradient, gradient.sum(0)]
    return largest_difference(expected, found)


def suits_own_attention(y: Tensor, heads: int, num_queries: int | None, needs_grad: bool) -> bool:
    """Tell whether our own attention kernels have room for so many tokens, and are right for them."""
    from vitrail.models.fused.attention_backward import fits
    from vitrail.models.fused.self_test import attention_works

    keys, channels = y.shape[1], y.shape[2] // heads
    if not fits(keys, channels, y.device):
        return False
    return is_fake(y) or attention_works(y.device, y.dtype, num_queries or keys, keys, heads, channels, needs_grad)
