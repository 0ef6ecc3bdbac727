"""What the Hopper matmul kernels share: a warp-specialised, persistent, ping-pong main loop.

Two consumer warpgroups take output tiles alternately. While one keeps the tensor cores busy the other runs its epilogue: adds a
bias, computes GELU, stores. An epilogue shorter than a main loop is therefore hidden. One producer warp issues TMA loads several
stages ahead.

Written in Gluon because Triton's `tl.dot` gives no control over which warps multiply and which run the epilogue.
"""

from __future__ import annotations

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitrail.models.fused.launch import ceil_div

# The first names are those of newer versions of Triton, the others those of 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
"""Output tile of a consumer warpgroup, and depth of one stage."""

LAUNCH = {"num_warps": 4, "maxnreg": 168}
"""For the first consumer; `warp_specialize` adds the other one and the producer, and moves the producer's registers to them."""

WORKER_WARPS = gl.constexpr([4, 1])
WORKER_REGISTERS = gl.constexpr([240, 24])


@gluon.jit
def tile_origin(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """First row and column of a tile. Tiles are numbered in groups of 8 rows, so that neighbours share operands in L2."""
    GROUP_M: gl.constexpr = 8
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    return (first_m + tile % (GROUP_M * tiles_n) % group_m) * BLOCK_M, tile % (GROUP_M * tiles_n) // group_m * BLOCK_N


@gluon.jit
def alloc_smem(COUNT: gl.constexpr, descriptor):
    """Shared memory for COUNT blocks of a TMA descriptor."""
    return gl.allocate_shared_memory(descriptor.dtype, [COUNT] + descriptor.block_type.shape, descriptor.layout)  # noqa: RUF005  (Gluon has no *)


@gluon.jit
def alloc_mbarriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """COUNT mbarriers, each of which completes a phase after ARRIVALS arrivals."""
    mbarriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(mbarriers.index(index), count=ARRIVALS)
    return mbarriers


@gluon.jit
def producer(a, b, a_smem, b_smem, full, empty, M, N, K, TRANSPOSED: gl.constexpr, PROGRAMS: gl.constexpr):
    """Run the producer warp: load every stage of every tile of this program, each as soon as its buffer is empty."""
    STAGES: gl.constexpr = a_smem.shape[0]
    BLOCK_M: gl.constexpr = a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    BLOCK_N: gl.constexpr = b_smem.shape[2 if TRANSPOSED else 1]
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), PROGRAMS):
        m, n = tile_origin(tile, M, N, BLOCK_M, BLOCK_N)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K * a.dtype.primitive_bitwidth // 8)
            tma_load(a, [m, k], full.index(stage), a_smem.index(stage))
            tma_load(b, [k, n] if TRANSPOSED else [n, k], full.index(stage), b_smem.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def mma_tile(a_smem, b_smem, full, empty, my_order, other_order, order_phase, stages_before, k_steps, TRANSPOSED: gl.constexpr):
    """Accumulate one output tile in float32, in the order of the tiles.

    b is [n, k] or, TRANSPOSED, [k, n]. `stages_before` counts the stages that all earlier tiles of this program have used.

    The two consumers wait for each other at a pair of order barriers, as CUTLASS's ping-pong kernels do. That is not only for
    speed: an mbarrier has one phase bit, so a consumer that ran ahead of the other by two fillings of a buffer could not tell them
    apart.
    """
    STAGES: gl.constexpr = a_smem.shape[0]
    BLOCK_M: gl.constexpr = a_smem.shape[1]
    BLOCK_N: gl.constexpr = b_smem.shape[2 if TRANSPOSED else 1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
    stage, phase = stages_before % STAGES, stages_before // STAGES & 1
    mbarrier.wait(my_order, order_phase)
    for k in range(k_steps):
        mbarrier.wait(full.index(stage), phase)
        b = b_smem.index(stage)
        if not TRANSPOSED:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_smem.index(stage), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=k > 0)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    mbarrier.arrive(other_order)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
    return acc


@gluon.jit
def split_n(acc):
    """Return the left and right half of an accumulator: an epilogue over a half at a time needs fewer registers."""
    return acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute([0, 2, 1]).split()


def aligned(weight: Tensor) -> Tensor:
    """Return a contiguous weight that begins at a multiple of 16 bytes, as TMA needs: one in a flat buffer may begin anywhere."""
    weight = weight.contiguous()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def tma_descriptor(matrix: Tensor, height: int, width: int) -> TensorDescriptor:
    """Describe a 16-bit matrix to the TMA unit, which copies [height, width] blocks of it."""
    return TensorDescriptor.from_tensor(matrix, [height, width], _smem_layout(height, width))


@functools.cache
def _smem_layout(height: int, width: int) -> gl.NVMMASharedLayout:
    """Return the layout of every 16-bit type. Cached: building it takes the CPU as long as a small matmul takes the GPU."""
    return gl.NVMMASharedLayout.get_default_for([height, width], gl.float16)


def num_tiles(M: int, N: int, block_m: int = BLOCK_M) -> int:
    return ceil_div(M, block_m) * ceil_div(N, BLOCK_N)
