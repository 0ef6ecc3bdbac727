"""How two groups of warps multiply large matrices on a Hopper GPU: by turns.

While one keeps the tensor cores busy the other finishes its tile: adds a bias, computes GELU, writes. So the end of a product costs
next to nothing as long as it is shorter than the product. A warp beside them fetches, several steps ahead, what is multiplied next.

Triton's own products cannot be divided so; this is written in Gluon, its lower level, which has to be told where everything lies.
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
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

ROWS, COLUMNS, INNER = 128, 128, 64
"""Of a tile that a group computes, and of what it multiplies in a step."""

LAUNCH = {"num_warps": 4, "maxnreg": 168}
"""For the first group; the other, and the warp that fetches, are added to it. The groups take registers over from that one."""

WORKERS = gl.constexpr([4, 1])
REGISTERS = gl.constexpr([240, 24])


@gluon.jit
def place(tile, rows, columns, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """First row and column of a tile. They are numbered so that neighbours share what they read."""
    TALL: gl.constexpr = 8
    down, across = gl.cdiv(rows, ROWS), gl.cdiv(columns, COLUMNS)
    top = tile // (TALL * across) * TALL
    height = min(down - top, TALL)
    return (top + tile % (TALL * across) % height) * ROWS, tile % (TALL * across) // height * COLUMNS


@gluon.jit
def rooms_for(COUNT: gl.constexpr, matrix):
    """Shared memory for so many of what is copied of a matrix at once."""
    return gl.allocate_shared_memory(matrix.dtype, [COUNT] + matrix.block_type.shape, matrix.layout)  # noqa: RUF005  (Gluon has no *)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """So many, each of which opens when it has been arrived at so often."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(COUNT):
        mbarrier.init(made.index(number), count=ARRIVALS)
    return made


@gluon.jit
def fetch(left, right, lefts, rights, ready, free, rows, columns, inner, TURNED: gl.constexpr, PROGRAMS: gl.constexpr):
    """What a warp does: all steps of all tiles of this program, each as soon as there is room for it."""
    STEPS: gl.constexpr = lefts.shape[0]
    ROWS: gl.constexpr = lefts.shape[1]
    INNER: gl.constexpr = lefts.shape[2]
    COLUMNS: gl.constexpr = rights.shape[2 if TURNED else 1]
    step, parity = 0, 1
    for tile in range(gl.program_id(0), gl.cdiv(rows, ROWS) * gl.cdiv(columns, COLUMNS), PROGRAMS):
        row, column = place(tile, rows, columns, ROWS, COLUMNS)
        for k in range(0, inner, INNER):
            mbarrier.wait(free.index(step), parity)
            mbarrier.expect(ready.index(step), (ROWS + COLUMNS) * INNER * left.dtype.primitive_bitwidth // 8)
            load_tile(left, [row, k], ready.index(step), lefts.index(step))
            load_tile(right, [k, column] if TURNED else [column, k], ready.index(step), rights.index(step))
            step += 1
            if step == STEPS:
                step = 0
                parity ^= 1


@gluon.jit
def multiply(lefts, rights, ready, free, mine, others, turn, done, count, TURNED: gl.constexpr):
    """A tile of the product, when it is this group's turn; `done` steps were before it, and it has `count`.

    Waiting for a turn is not only for speed: a barrier tells one filling of a place from the next, not from the one after.
    """
    STEPS: gl.constexpr = lefts.shape[0]
    ROWS: gl.constexpr = lefts.shape[1]
    COLUMNS: gl.constexpr = rights.shape[2 if TURNED else 1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    total = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    step, parity = done % STEPS, done // STEPS & 1
    mbarrier.wait(mine, turn)
    for k in range(count):
        mbarrier.wait(ready.index(step), parity)
        right = rights.index(step)
        if not TURNED:
            right = right.permute((1, 0))
        total = warpgroup_mma(lefts.index(step), right, total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        mbarrier.arrive(free.index(gl.where(step == 0, STEPS - 1, step - 1)), pred=k > 0)
        step += 1
        if step == STEPS:
            step = 0
            parity ^= 1
    mbarrier.arrive(others)
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    mbarrier.arrive(free.index(gl.where(step == 0, STEPS - 1, step - 1)))
    return total


@gluon.jit
def halves(tile):
    """The left and the right half of a tile, so that less is held at once."""
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute([0, 2, 1]).split()


def described(matrix: Tensor, height: int, width: int) -> TensorDescriptor:
    """A matrix as the GPU's copying unit wants it: with the height and width of what is copied at once."""
    return TensorDescriptor.from_tensor(matrix, [height, width], _layout(height, width))


@functools.cache
def _layout(height: int, width: int) -> gl.NVMMASharedLayout:
    """Of numbers of 16 bits, whichever. Made once: making it takes the processor as long as a small product the GPU."""
    return gl.NVMMASharedLayout.get_default_for([height, width], gl.float16)


def tiles(rows: int, columns: int, tall: int = ROWS) -> int:
    return ceil_div(rows, tall) * ceil_div(columns, COLUMNS)
