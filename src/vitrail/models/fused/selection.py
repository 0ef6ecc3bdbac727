"""Choose between a Hopper kernel and torch's, by shape and by a check on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.fused.launch import is_fake, num_sms, sm_major
from vitrail.models.fused.self_test import passes, rejected, remember
from vitrail.models.fused.self_test_cases import largest_difference

TOLERANCE = 0.01  # relative error of a row: a few times that of rounding to low precision
_ROWS = 40_037  # every program computes several tiles, and the last ones are not full
_FEW_ROWS = 150  # tiles have fewer rows then


def use_own_matmul(x: Tensor, columns: int, epilogue: Literal["bias", "gelu"]) -> bool:
    """Return whether x [..., inner] times a weight with so many columns is for our kernels, and right on this device.

    With GELU in the epilogue they are faster than cuBLAS and a separate pass, except for two to four images, where both are about
    equal; with a bias they are for many rows. Without an epilogue cuBLAS is faster: its larger tiles need less power.
    """
    inner, rows = x.shape[-1], x.numel() // x.shape[-1]
    if x.dtype not in (torch.bfloat16, torch.float16) or columns % 128 or inner % 64 or rows < 64:
        return False
    if is_fake(x):  # memory is planned for a Hopper GPU
        return True
    enough = epilogue == "gelu" or rows * columns >= 8 * 128 * 128 * num_sms(x.device)
    return x.is_cuda and enough and _works(x.device, x.dtype)


def use_norm_epilogue(x: Tensor, bias_columns: int, gelu_columns: int) -> bool:
    """Return whether matmuls with so many columns, one with bias and one with GELU, can apply the norm in their epilogue."""
    if not (use_own_matmul(x, bias_columns, "bias") and use_own_matmul(x, gelu_columns, "gelu")):
        return False
    return is_fake(x) or _norm_epilogue_works(x.device, x.dtype)


@remember(rejected)
def _norm_epilogue_works(device: torch.device, dtype: torch.dtype) -> bool:
    message = "Matmuls with a folded norm are not used here (%s). Using separate norms, which are a little slower."
    return passes(device, TOLERANCE, lambda: _norm_epilogue_difference(device, dtype), message)


def _norm_epilogue_difference(device: torch.device, dtype: torch.dtype) -> float:
    """Return the worst relative error of matmuls with a layer norm in their epilogue, for tokens far from mean zero."""
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu
    from vitrail.models.fused.residual_norm import residual_centred

    generator, sizes = torch.Generator(device).manual_seed(0), ((1, _ROWS, 192), (1, _ROWS, 192), (192,), (256, 192), (256,))
    x, branch, branch_bias, weight, bias = (torch.randn(size, device=device, generator=generator).to(dtype) / 4 for size in sizes)
    x, mean = x + 10, torch.full((1, _ROWS), 5.0, device=device)
    total = x.float() + branch.float() + branch_bias.float()
    exact = F.linear(F.layer_norm(total[0], (192,), eps=1e-6), weight.float(), bias.float())
    expected = [total.mean(-1) + mean]
    x, rstd, mean = residual_centred(x, branch, branch_bias, None, None, 0.0, 1e-6, mean)
    found = [mean]
    for rows in (_ROWS, _FEW_ROWS):
        expected += [exact[:rows], *(_gelu(exact[:rows], tanh) for tanh in (True, False))]
        found += [matmul_bias(x[0, :rows], weight, bias, rstd[0, :rows])]
        found += [matmul_bias_gelu(x[0, :rows], weight, bias, tanh, rstd[0, :rows]) for tanh in (True, False)]
    return largest_difference(expected, found)


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def use_hopper_attention(qkv: Tensor, heads: int, needs_grad: bool) -> bool:
    """Return whether attention over queries, keys and values [image, token, 3 · width] is for `hopper_attention.py`.

    It is for heads of the paper's width, more of them than SMs, and enough tokens for a tile per consumer warpgroup.
    """
    images, tokens, width = *qkv.shape[:2], qkv.shape[2] // 3
    if qkv.dtype not in (torch.bfloat16, torch.float16) or width != 64 * heads or not 128 < tokens <= 224 or is_fake(qkv):
        return False
    many = qkv.is_cuda and images * heads >= 1.5 * num_sms(qkv.device)
    return many and _hopper_attention_works(qkv.device, qkv.dtype, tokens, heads, needs_grad)


@remember(rejected)
def _hopper_attention_works(device: torch.device, dtype: torch.dtype, tokens: int, heads: int, needs_grad: bool) -> bool:
    """Return whether this is a Hopper GPU and the kernel is right for so many tokens: each number is compiled separately."""
    message = f"The fastest attention kernel for {tokens} tokens is not used here (%s). Using a slower one."
    args = device, dtype, tokens, heads, needs_grad
    return sm_major(device) == 9 and passes(device, TOLERANCE, lambda: _hopper_attention_difference(*args), message)


def _hopper_attention_difference(device: torch.device, dtype: torch.dtype, tokens: int, heads: int, needs_grad: bool) -> float:
    """Return the worst relative error of the output and of softmax's logsumexp; each program gets several heads."""
    from vitrail.models.fused.hopper_attention import hopper_attention

    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(3, tokens, 3 * 64 * heads, device=device, generator=generator).to(dtype)
    q, k, v = qkv.float().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1) / 8
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    out, lse = hopper_attention(qkv, heads, needs_grad=needs_grad, programs=max(1, 3 * heads // 7))
    worst = largest_difference([expected], [out], 64)
    return max(worst, largest_difference([scores.logsumexp(-1)], [lse])) if needs_grad else worst


@remember(rejected)
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this is a Hopper GPU and the kernels are right there."""
    message = "Vitrail's matmul kernels are not used here (%s). Using cuBLAS and separate passes, which are slower."
    return sm_major(device) == 9 and passes(device, TOLERANCE, lambda: _difference(device, dtype), message)


def _difference(device: torch.device, dtype: torch.dtype) -> float:
    """Return the worst relative error of matmuls and of GELU's value, derivative and gradient, in both forms."""
    from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu, matmul_bias_gelu_with_grad

    generator, sizes = torch.Generator(device).manual_seed(0), ((_ROWS, 192), (256, 192), (256,), (192, 256))
    x, up, bias, down = (torch.randn(size, device=device, generator=generator).to(dtype) / 4 for size in sizes)
    hidden = F.linear(x.float(), up.float(), bias.float()).requires_grad_()
    expected, found = [hidden, hidden[:_FEW_ROWS]], [matmul_bias(x, up, bias), matmul_bias(x[:_FEW_ROWS], up, bias)]
    for tanh in (True, False):
        value = _gelu(hidden, tanh)
        (derivative,) = torch.autograd.grad(value.sum(), hidden)
        again, gelu_grad = matmul_bias_gelu_with_grad(x, up, bias, tanh)
        gradient = (x.float() @ down.float()) * gelu_grad.float()
        expected += [value, value[:_FEW_ROWS], value, derivative, gradient, gradient.sum(0)]
        found += [matmul_bias_gelu(x, up, bias, tanh), matmul_bias_gelu(x[:_FEW_ROWS], up, bias, tanh), again, gelu_grad]
        found += matmul_gelu_backward(x, down, gelu_grad)
    return largest_difference(expected, found)


def hopper_differences(device: torch.device, dtype: torch.dtype, tokens: int, heads: int) -> dict[str, Callable[[], float]]:
    """Return the checks of the Hopper kernels by the kernels' names: each computes a relative error."""
    return {
        "Hopper matmuls with bias, GELU and its gradient": lambda: _difference(device, dtype),
        "Hopper matmuls with a folded norm": lambda: _norm_epilogue_difference(device, dtype),
        f"Hopper attention over {tokens} tokens": lambda: _hopper_attention_difference(device, dtype, tokens, heads, True),
    }


def suits_own_attention(y: Tensor, heads: int, num_queries: int | None, needs_grad: bool, qk_norm: bool) -> bool:
    """Return whether our attention kernels can hold so many tokens, and are right for them."""
    from vitrail.models.fused.attention_backward import fits
    from vitrail.models.fused.self_test import attention_works

    keys, channels = y.shape[1], y.shape[2] // heads
    if not fits(keys, channels, y.device):
        return False
    return is_fake(y) or attention_works(y.device, y.dtype, num_queries or keys, keys, heads, channels, needs_grad, qk_norm)
