"""The gradient at what enters GELU: the product with the MLP's second weight, times the derivative that `up_gelu` kept.

In the end of the product, with the sums for the first bias, it costs a few multiplications; a pass of its own would read and
write the widest tensors of a block once more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from vitrail.models.fused.column_sum import column_sum
from vitrail.models.fused.launch import ceil_div, is_fake, num_sms
from vitrail.models.fused.pingpong import (
    COLUMNS,
    INNER,
    LAUNCH,
    REGISTERS,
    ROWS,
    WORKERS,
    barriers,
    described,
    fetch,
    halves,
    load_tile,
    multiply,
    place,
    rooms_for,
    store_tile,
    tiles,
)

_STEPS = 4  # fetched ahead


@gluon.jit
def _finish(x, room, sums, column):
    """Half a tile times the derivative that lies in a room, put into its place, and the sums of its columns."""
    value = x * room.load(x.type.layout).to(gl.float32)
    room.store(value.to(room.dtype))
    gl.store(sums + column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)), gl.sum(value, axis=0))


@gluon.jit
def _group(given, NUMBER: gl.constexpr, PROGRAMS: gl.constexpr):
    """What one of the two groups of warps does: every other tile of this program."""
    lefts, rights, ready, free, turns, rooms, arrived, slope, out, sums, rows, columns, inner = given
    ROWS: gl.constexpr = lefts.shape[1]
    COLUMNS: gl.constexpr = rights.shape[2]
    HALF: gl.constexpr = COLUMNS // 2
    count = gl.cdiv(inner, lefts.shape[2])
    done, turn, parity = NUMBER * count, 1 - NUMBER, 0
    one, two, here = rooms.index(2 * NUMBER), rooms.index(2 * NUMBER + 1), arrived.index(NUMBER)
    for tile in range(gl.program_id(0) + NUMBER * PROGRAMS, gl.cdiv(rows, ROWS) * gl.cdiv(columns, COLUMNS), 2 * PROGRAMS):
        row, column = place(tile, rows, columns, ROWS, COLUMNS)
        tma.store_wait(0)
        # Asked for before the product, so that it is there after it.
        mbarrier.expect(here, ROWS * COLUMNS * slope.dtype.primitive_bitwidth // 8)
        load_tile(slope, [row, column], here, one)
        load_tile(slope, [row, column + HALF], here, two)
        mine, others = turns.index(NUMBER), turns.index(1 - NUMBER)
        left, right = halves(multiply(lefts, rights, ready, free, mine, others, turn, done, count, True))
        done += 2 * count
        turn ^= 1
        mbarrier.wait(here, parity)
        parity ^= 1
        found = sums + (row // ROWS).to(gl.int64) * columns
        _finish(left, one, found, column)
        _finish(right, two, found, column + HALF)
        fence_async_shared()
        store_tile(out, [row, column], one)
        store_tile(out, [row, column + HALF], two)
    tma.store_wait(0)


@gluon.jit
def _back_gelu_kernel(left, right, slope, out, sums, rows, columns, inner, STEPS: gl.constexpr, PROGRAMS: gl.constexpr):
    lefts, rights, rooms = rooms_for(STEPS, left), rooms_for(STEPS, right), rooms_for(4, out)
    ready, free, turns, arrived = barriers(STEPS), barriers(STEPS), barriers(2), barriers(2)
    given = (lefts, rights, ready, free, turns, rooms, arrived, slope, out, sums, rows, columns, inner)
    gl.warp_specialize(
        [
            (_group, (given, 0, PROGRAMS)),
            (_group, (given, 1, PROGRAMS)),
            (fetch, (left, right, lefts, rights, ready, free, rows, columns, inner, True, PROGRAMS)),
        ],
        WORKERS,
        REGISTERS,
    )


def back_gelu(dbranch: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """(dbranch W) ∘ slope in the slope's precision, and its sum over rows in float32."""
    dhidden = torch.empty_like(slope)
    rows, (inner, columns) = dbranch.numel() // len(weight), weight.shape
    sums = torch.empty(ceil_div(rows, ROWS), columns, dtype=torch.float32, device=slope.device)
    if not is_fake(dbranch):
        count = min(num_sms(slope.device), tiles(rows, columns))
        _back_gelu_kernel[(count,)](
            described(dbranch.reshape(rows, inner), ROWS, INNER),
            described(weight, INNER, COLUMNS),
            *(described(one.view(rows, columns), ROWS, COLUMNS // 2) for one in (slope, dhidden)),
            sums, rows, columns, inner, STEPS=_STEPS, PROGRAMS=count, **LAUNCH,
        )  # fmt: skip
    return dhidden, column_sum(sums, torch.float32)
