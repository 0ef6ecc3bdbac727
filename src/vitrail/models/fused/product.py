"""Products with a weight, a bias or bias and GELU in their end, on Hopper GPUs.

What enters GELU is never written. For a gradient its derivative is, which is all that the backward pass (`back_gelu.py`) needs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from vitrail.models.fused.launch import is_fake, num_sms
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
    multiply,
    place,
    rooms_for,
    store_tile,
    tiles,
)

_STEPS = 5  # fetched ahead


@gluon.jit
def _gelu(x, TANH: gl.constexpr):
    """GELU and its derivative.

    Φ(x), by which GELU multiplies x, is a logistic function of a polynomial, whose derivative is `steep`. The tanh form is exactly
    that. For the erf form four coefficients of either were fitted for least error: below 2e-5 for GELU, below 5e-5 for its
    derivative. Beyond 5 they are not followed further.
    """
    square = x * x
    if TANH:
        inner = x * (-2.302208198 + square * -0.10294324)
        steep = 1.595769122 + square * 0.2140644488
    else:
        square = gl.minimum(square, 25.0)
        inner = x * (-2.30164078 + square * (-0.105990105 + square * (7.38113483e-04 + square * 2.46914566e-05)))
        steep = 1.59521493 + square * (0.220498993 + square * (-2.54096609e-03 + square * -1.26102324e-04))
    root = gl.rsqrt(1.0 + gl.exp2(inner))
    chance = root * root  # one instruction less than a division
    value = x * chance
    return value, chance + value * steep * (1.0 - chance)


@gluon.jit
def _write(matrix, value, room, row, column):
    tma.store_wait(1)  # the other room may still be read
    room.store(value.to(matrix.dtype))
    fence_async_shared()
    store_tile(matrix, [row, column], room)


@gluon.jit
def _finish(x, factors, bias, slope, out, room, spare, row, column, rows, GELU: gl.constexpr):
    """Write half a tile, and GELU's derivative into `slope`, if there is one."""
    if factors is not None:
        at = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
        x *= gl.load(factors + at, mask=at < rows, other=0.0)[:, None]
    x += gl.load(bias + column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))).to(gl.float32)[None, :]
    if GELU is None:
        _write(out, x, room, row, column)
    else:
        value, derivative = _gelu(x, GELU == "tanh")
        _write(out, value, room, row, column)
        if slope is not None:
            _write(slope, derivative, spare, row, column)


@gluon.jit
def _group(given, NUMBER: gl.constexpr, GELU: gl.constexpr, PROGRAMS: gl.constexpr):
    """What one of the two groups of warps does: every other tile of this program."""
    lefts, rights, ready, free, turns, rooms, factors, bias, slope, out, rows, columns, inner = given
    ROWS: gl.constexpr = lefts.shape[1]
    COLUMNS: gl.constexpr = rights.shape[1]
    count = gl.cdiv(inner, lefts.shape[2])
    done, turn = NUMBER * count, 1 - NUMBER
    one, two = rooms.index(2 * NUMBER), rooms.index(2 * NUMBER + 1)
    for tile in range(gl.program_id(0) + NUMBER * PROGRAMS, gl.cdiv(rows, ROWS) * gl.cdiv(columns, COLUMNS), 2 * PROGRAMS):
        row, column = place(tile, rows, columns, ROWS, COLUMNS)
        mine, others = turns.index(NUMBER), turns.index(1 - NUMBER)
        left, right = halves(multiply(lefts, rights, ready, free, mine, others, turn, done, count, False))
        done += 2 * count
        turn ^= 1
        _finish(left, factors, bias, slope, out, one, two, row, column, rows, GELU)
        _finish(right, factors, bias, slope, out, two if slope is None else one, two, row, column + COLUMNS // 2, rows, GELU)
    tma.store_wait(0)


@gluon.jit
def _product_kernel(
    left, right, factors, bias, slope, out, rows, columns, inner,
    STEPS: gl.constexpr, GELU: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    lefts, rights, rooms = rooms_for(STEPS, left), rooms_for(STEPS, right), rooms_for(4, out)
    ready, free, turns = barriers(STEPS), barriers(STEPS), barriers(2)
    given = (lefts, rights, ready, free, turns, rooms, factors, bias, slope, out, rows, columns, inner)
    gl.warp_specialize(
        [
            (_group, (given, 0, GELU, PROGRAMS)),
            (_group, (given, 1, GELU, PROGRAMS)),
            (fetch, (left, right, lefts, rights, ready, free, rows, columns, inner, False, PROGRAMS)),
        ],
        WORKERS,
        REGISTERS,
    )


def product(x: Tensor, weight: Tensor, bias: Tensor, *, factors: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, with each row of x times its factor, if there are any. Has no gradient."""
    return _launch(x, weight, bias, None, factors, None)


def up_gelu(
    y: Tensor, weight: Tensor, bias: Tensor, tanh: bool, *, factors: Tensor | None = None, slope: Tensor | None = None
) -> Tensor:
    """GELU(y Wᵀ + b), rounded once, with factors as in `product`; its derivative is written to `slope`, if given. No gradient."""
    return _launch(y, weight, bias, "tanh" if tanh else "erf", factors, slope)


def _launch(x: Tensor, weight: Tensor, bias: Tensor, gelu: str | None, factors: Tensor | None, slope: Tensor | None) -> Tensor:
    columns, inner = weight.shape
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    if is_fake(x):
        return out
    rows = x.numel() // inner
    tall = ROWS if tiles(rows, columns) >= num_sms(x.device) else ROWS // 2  # for an image or two
    count = min(num_sms(x.device), tiles(rows, columns, tall))
    _product_kernel[(count,)](
        described(x.reshape(rows, inner), tall, INNER),
        described(weight, COLUMNS, INNER),
        factors,
        bias,
        None if slope is None else described(slope.view(rows, columns), tall, COLUMNS // 2),
        described(out.view(rows, columns), tall, COLUMNS // 2),
        rows, columns, inner, STEPS=_STEPS, GELU=gelu, PROGRAMS=count, **LAUNCH,
    )  # fmt: skip
    return out
