"""The gradient at GELU's input on Hopper GPUs: the matmul with the MLP's second weight, times GELU's derivative, in one kernel.

The multiplication by the derivative that `matmul_bias_gelu_with_grad` stored, and the column sums for the first bias, are the
epilogue. A separate elementwise kernel would read and write the widest tensors of a block once more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from vitrail.models.fused.column_sum import column_sum
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
    tma_load,
    tma_store,
)
from vitrail.models.fused.launch import ceil_div, num_sms
from vitrail.models.fused.ops import matmul_flops, op

_STAGES = 4


@gluon.jit
def _epilogue(acc, smem, column_sums, n):
    """Multiply half a tile by the derivative in `smem`, write the result there, and store the sums of its columns."""
    value = acc * smem.load(acc.type.layout).to(gl.float32)
    smem.store(value.to(smem.dtype))
    gl.store(column_sums + n + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)), gl.sum(value, axis=0))


@gluon.jit
def _consumer(args, CONSUMER: gl.constexpr, PROGRAMS: gl.constexpr):
    """Run one of the two consumer warpgroups: every other tile of this program."""
    a_smem, b_smem, full, empty, order_barriers, grad_smem, grad_full, gelu_grad, out, column_sums, M, N, K = args
    BLOCK_M: gl.constexpr = a_smem.shape[1]
    BLOCK_N: gl.constexpr = b_smem.shape[2]
    HALF_N: gl.constexpr = BLOCK_N // 2
    k_steps = gl.cdiv(K, a_smem.shape[2])
    stages_before, order_phase, grad_phase = CONSUMER * k_steps, 1 - CONSUMER, 0
    left_smem, right_smem = grad_smem.index(2 * CONSUMER), grad_smem.index(2 * CONSUMER + 1)
    my_grad_full = grad_full.index(CONSUMER)
    for tile in range(gl.program_id(0) + CONSUMER * PROGRAMS, gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), 2 * PROGRAMS):
        m, n = tile_origin(tile, M, N, BLOCK_M, BLOCK_N)
        tma.store_wait(0)
        # Loaded before the main loop, so that it has arrived after it.
        mbarrier.expect(my_grad_full, BLOCK_M * BLOCK_N * gelu_grad.dtype.primitive_bitwidth // 8)
        tma_load(gelu_grad, [m, n], my_grad_full, left_smem)
        tma_load(gelu_grad, [m, n + HALF_N], my_grad_full, right_smem)
        my_order, other_order = order_barriers.index(CONSUMER), order_barriers.index(1 - CONSUMER)
        acc = mma_tile(a_smem, b_smem, full, empty, my_order, other_order, order_phase, stages_before, k_steps, True)
        left, right = split_n(acc)
        stages_before += 2 * k_steps
        order_phase ^= 1
        mbarrier.wait(my_grad_full, grad_phase)
        grad_phase ^= 1
        tile_sums = column_sums + (m // BLOCK_M).to(gl.int64) * N
        _epilogue(left, left_smem, tile_sums, n)
        _epilogue(right, right_smem, tile_sums, n + HALF_N)
        fence_async_shared()
        tma_store(out, [m, n], left_smem)
        tma_store(out, [m, n + HALF_N], right_smem)
    tma.store_wait(0)


@gluon.jit
def _matmul_gelu_backward_kernel(a, b, gelu_grad, out, column_sums, M, N, K, STAGES: gl.constexpr, PROGRAMS: gl.constexpr):
    a_smem, b_smem, grad_smem = alloc_smem(STAGES, a), alloc_smem(STAGES, b), alloc_smem(4, out)
    full, empty = alloc_mbarriers(STAGES), alloc_mbarriers(STAGES)
    order_barriers, grad_full = alloc_mbarriers(2), alloc_mbarriers(2)
    args = (a_smem, b_smem, full, empty, order_barriers, grad_smem, grad_full, gelu_grad, out, column_sums, M, N, K)
    gl.warp_specialize(
        [
            (_consumer, (args, 0, PROGRAMS)),
            (_consumer, (args, 1, PROGRAMS)),
            (producer, (a, b, a_smem, b_smem, full, empty, M, N, K, True, PROGRAMS)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def _fake(grad_out: Tensor, weight: Tensor, gelu_grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gelu_grad), gelu_grad.new_empty(weight.shape[1], dtype=torch.float32)


@op(
    "matmul_gelu_backward(Tensor grad_out, Tensor weight, Tensor gelu_grad) -> (Tensor, Tensor)",
    _fake,
    lambda grad_out, weight, *rest, **named: matmul_flops(grad_out, weight[::-1]),
)
def matmul_gelu_backward(grad_out: Tensor, weight: Tensor, gelu_grad: Tensor) -> tuple[Tensor, Tensor]:
    """(grad_out W) ∘ gelu_grad in the precision of gelu_grad, and its sum over rows in float32."""
    grad_hidden = torch.empty_like(gelu_grad)
    M, (K, N) = grad_out.numel() // len(weight), weight.shape
    column_sums = torch.empty(ceil_div(M, BLOCK_M), N, dtype=torch.float32, device=gelu_grad.device)
    programs = min(num_sms(gelu_grad.device), num_tiles(M, N))
    _matmul_gelu_backward_kernel[(programs,)](
        tma_descriptor(grad_out.reshape(M, K), BLOCK_M, BLOCK_K),
        tma_descriptor(aligned(weight), BLOCK_K, BLOCK_N),
        *(tma_descriptor(one.view(M, N), BLOCK_M, BLOCK_N // 2) for one in (gelu_grad, grad_hidden)),
        column_sums, M, N, K, STAGES=_STAGES, PROGRAMS=programs, **LAUNCH,
    )  # fmt: skip
    return grad_hidden, column_sum(column_sums, torch.float32)
