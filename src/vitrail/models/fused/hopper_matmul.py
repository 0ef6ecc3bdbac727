"""Matmuls with a bias or bias + GELU epilogue on Hopper GPUs.

GELU's input is never written. Where a gradient is needed its derivative is, which is all that the backward pass
(`hopper_gelu_backward.py`) reads.

With `rstd` the epilogue also multiplies each row by its own factor. For tokens with mean zero that is all that is left of the layer
norm before the matmul, so that normalised tokens are never written (`folded_block.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from vitrail.models.fused.hopper_pingpong import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    LAUNCH,
    WORKER_REGISTERS,
    WORKER_WARPS,
    aligned,
    alloc_mbarriers,
    alloc_smem,
    mma_tile,
    num_tiles,
    producer,
    split_n,
    tile_origin,
    tma_descriptor,
    tma_store,
)
from vitrail.models.fused.launch import num_sms
from vitrail.models.fused.ops import matmul_flops, op

_STAGES = 5


@gluon.jit
def _gelu(x, TANH: gl.constexpr):
    """GELU and its derivative.

    GELU is x · Φ(x). Φ is computed as a logistic function of a polynomial, and `steepness` is that polynomial's derivative. For the
    tanh form this is exact. For the erf form four coefficients of each were fitted for the least largest error: below 2e-5 for
    GELU, below 5e-5 for its derivative; the polynomials are clamped at |x| = 5.
    """
    square = x * x
    if TANH:
        exponent = x * (-2.302208198 + square * -0.10294324)
        steepness = 1.595769122 + square * 0.2140644488
    else:
        square = gl.minimum(square, 25.0)
        exponent = x * (-2.30164078 + square * (-0.105990105 + square * (7.38113483e-04 + square * 2.46914566e-05)))
        steepness = 1.59521493 + square * (0.220498993 + square * (-2.54096609e-03 + square * -1.26102324e-04))
    root = gl.rsqrt(1.0 + gl.exp2(exponent))
    phi = root * root  # one instruction fewer than a division
    value = x * phi
    return value, phi + value * steepness * (1.0 - phi)


@gluon.jit
def _store(matrix, value, smem, m, n):
    tma.store_wait(1)  # the other buffer may still be being read
    smem.store(value.to(matrix.dtype))
    fence_async_shared()
    tma_store(matrix, [m, n], smem)


@gluon.jit
def _epilogue(acc, rstd, bias, gelu_grad, out, smem, grad_smem, m, n, M, GELU: gl.constexpr):
    """Store half a tile, and GELU's derivative into `gelu_grad`, if there is one."""
    if rstd is not None:
        row = m + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc *= gl.load(rstd + row, mask=row < M, other=0.0)[:, None]
    acc += gl.load(bias + n + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))).to(gl.float32)[None, :]
    if GELU is None:
        _store(out, acc, smem, m, n)
    else:
        value, derivative = _gelu(acc, GELU == "tanh")
        _store(out, value, smem, m, n)
        if gelu_grad is not None:
            _store(gelu_grad, derivative, grad_smem, m, n)


@gluon.jit
def _consumer(args, CONSUMER: gl.constexpr, GELU: gl.constexpr, PROGRAMS: gl.constexpr):
    """Run one of the two consumer warpgroups: every other tile of this program."""
    a_smem, b_smem, full, empty, order_barriers, out_smem, rstd, bias, gelu_grad, out, M, N, K = args
    BLOCK_M: gl.constexpr = a_smem.shape[1]
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    k_steps = gl.cdiv(K, a_smem.shape[2])
    stages_before, order_phase = CONSUMER * k_steps, 1 - CONSUMER
    smem1, smem2 = out_smem.index(2 * CONSUMER), out_smem.index(2 * CONSUMER + 1)
    for tile in range(gl.program_id(0) + CONSUMER * PROGRAMS, gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), 2 * PROGRAMS):
        m, n = tile_origin(tile, M, N, BLOCK_M, BLOCK_N)
        my_order, other_order = order_barriers.index(CONSUMER), order_barriers.index(1 - CONSUMER)
        acc = mma_tile(a_smem, b_smem, full, empty, my_order, other_order, order_phase, stages_before, k_steps, False)
        left, right = split_n(acc)
        stages_before += 2 * k_steps
        order_phase ^= 1
        right_smem = smem2 if gelu_grad is None else smem1
        _epilogue(left, rstd, bias, gelu_grad, out, smem1, smem2, m, n, M, GELU)
        _epilogue(right, rstd, bias, gelu_grad, out, right_smem, smem2, m, n + BLOCK_N // 2, M, GELU)
    tma.store_wait(0)


@gluon.jit
def _matmul_bias_kernel(
    a, b, rstd, bias, gelu_grad, out, M, N, K,
    STAGES: gl.constexpr, GELU: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    a_smem, b_smem, out_smem = alloc_smem(STAGES, a), alloc_smem(STAGES, b), alloc_smem(4, out)
    full, empty, order_barriers = alloc_mbarriers(STAGES), alloc_mbarriers(STAGES), alloc_mbarriers(2)
    args = (a_smem, b_smem, full, empty, order_barriers, out_smem, rstd, bias, gelu_grad, out, M, N, K)
    gl.warp_specialize(
        [
            (_consumer, (args, 0, GELU, PROGRAMS)),
            (_consumer, (args, 1, GELU, PROGRAMS)),
            (producer, (a, b, a_smem, b_smem, full, empty, M, N, K, False, PROGRAMS)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def _fake_matmul(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _fake_matmul_with_grad(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_matmul(x, weight), _fake_matmul(x, weight)


@op("matmul_bias(Tensor x, Tensor weight, Tensor bias, Tensor? rstd=None) -> Tensor", _fake_matmul, matmul_flops)
def matmul_bias(x: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. `rstd` (float32) holds a factor for each row of x. Has no gradient."""
    return _launch(x, weight, bias, None, rstd, None)


@op("matmul_bias_gelu(Tensor x, Tensor weight, Tensor bias, bool tanh, Tensor? rstd=None) -> Tensor", _fake_matmul, matmul_flops)
def matmul_bias_gelu(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool, rstd: Tensor | None = None) -> Tensor:
    """GELU(x Wᵀ + b), rounded once. `rstd` (float32) holds a factor for each row of x. Has no gradient."""
    return _launch(x, weight, bias, tanh, rstd, None)


@op(
    "matmul_bias_gelu_with_grad(Tensor x, Tensor weight, Tensor bias, bool tanh) -> (Tensor, Tensor)",
    _fake_matmul_with_grad,
    matmul_flops,
)
def matmul_bias_gelu_with_grad(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """GELU(x Wᵀ + b) and GELU's derivative there, each rounded once."""
    gelu_grad = x.new_empty(*x.shape[:-1], len(weight))
    return _launch(x, weight, bias, tanh, None, gelu_grad), gelu_grad


def _launch(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool | None, rstd: Tensor | None, gelu_grad: Tensor | None) -> Tensor:
    N, K = weight.shape
    out = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    M = x.numel() // K
    block_m = BLOCK_M if num_tiles(M, N) >= num_sms(x.device) else BLOCK_M // 2  # for one or two images
    programs = min(num_sms(x.device), num_tiles(M, N, block_m))
    _matmul_bias_kernel[(programs,)](
        tma_descriptor(x.reshape(M, K), block_m, BLOCK_K),
        tma_descriptor(aligned(weight), BLOCK_N, BLOCK_K),
        rstd, bias,
        None if gelu_grad is None else tma_descriptor(gelu_grad.view(M, N), block_m, BLOCK_N // 2),
        tma_descriptor(out.view(M, N), block_m, BLOCK_N // 2),
        M, N, K, STAGES=_STAGES, GELU=None if tanh is None else "tanh" if tanh else "erf", PROGRAMS=programs, **LAUNCH,
    )  # fmt: skip
    return out
