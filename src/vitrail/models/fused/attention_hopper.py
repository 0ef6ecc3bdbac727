"""Attention's forward pass over 129 to 224 tokens on a Hopper GPU: three groups of warps take tiles of queries in turn.

A warp beside them fetches the queries, keys and values of the next head while they are at work on one. So nobody waits for
memory; and with three groups there is nearly always one that multiplies while others compute exponentials.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitrail.models.fused.attention_forward import split_pow2
from vitrail.models.fused.launch import ceil_div, num_sms
from vitrail.models.fused.pingpong import barriers, load_tile, rooms_for, store_tile

_TILE = 64  # queries that a group takes at once; also the width of a head
_PADDED = 256  # keys that are fetched, of which up to 224 are multiplied
_HEADS = 2  # in shared memory at once
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
_GROUPS = gl.constexpr(3)
_WORKERS = gl.constexpr([4, 4, 1])
_REGISTERS = gl.constexpr([160, 160, 24])


@gluon.jit
def _fetch(few, many, qs, ks, vs, ready, free, total, heads: gl.constexpr, TILES: gl.constexpr):
    """What a warp does: all heads of this program, each as soon as there is room for it."""
    HEADS: gl.constexpr = ks.shape[0]
    WIDTH: gl.constexpr = ks.shape[3]
    step, parity = 0, 1
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        image, column = item // heads, item % heads * WIDTH
        mbarrier.wait(free.index(step), parity)
        mbarrier.expect(ready.index(step), (TILES * qs.shape[2] + 2 * ks.shape[2]) * WIDTH * ks.dtype.primitive_bitwidth // 8)
        load_tile(many, [image, 0, heads * WIDTH + column], ready.index(step), ks.index(step))
        for tile in gl.static_range(TILES):
            load_tile(few, [image, tile * qs.shape[2], column], ready.index(step), qs.index(step * TILES + tile))
        load_tile(many, [image, 0, 2 * heads * WIDTH + column], ready.index(step), vs.index(step))
        step += 1
        if step == HEADS:
            step = 0
            parity ^= 1


@gluon.jit
def _scores(q, k, FROM: gl.constexpr, COUNT: gl.constexpr):
    """Queries times so many keys, in flight."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    QUERIES: gl.constexpr = q.shape[0]
    zero = gl.zeros([QUERIES, COUNT], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.slice(FROM, COUNT, 0).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _known(scores, FROM: gl.constexpr, keys: gl.constexpr):
    """Scores with those beyond the last key taken out."""
    if FROM + scores.shape[1] > keys:
        key = FROM + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = gl.where((key < keys)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _highest(scores, ROW: gl.constexpr):
    return gl.convert_layout(gl.max(scores, axis=1), ROW)


@gluon.jit
def _weigh(scores, v, top, per_log2, total, value, FROM: gl.constexpr, OUT: gl.constexpr):
    """Add what some keys contribute to the sum of weights and, in flight, to the values weighed by them."""
    p = gl.exp2(scores * per_log2 - gl.convert_layout(top, gl.SliceLayout(1, scores.type.layout))[:, None])
    total += gl.convert_layout(gl.sum(p, axis=1), gl.SliceLayout(1, OUT))
    low = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, OUT, 2))
    return total, warpgroup_mma(low, v.slice(FROM, scores.shape[1], 0), value, is_async=True)


@gluon.jit
def _group(
    given, NUMBER: gl.constexpr, keys: gl.constexpr, heads: gl.constexpr, TILES: gl.constexpr,
    ONE: gl.constexpr, TWO: gl.constexpr, THREE: gl.constexpr,
):  # fmt: skip
    """What one of the groups does: every third tile of this program, with all keys in two or three pieces."""
    qs, ks, vs, ready, free, rooms, out, lse, per_log2, total_heads = given
    HEADS: gl.constexpr = ks.shape[0]
    TILE: gl.constexpr = qs.shape[2]
    WIDTH: gl.constexpr = ks.shape[3]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    room = rooms.index(NUMBER)
    tiles = gl.cdiv(total_heads - gl.program_id(0), gl.num_programs(0)) * TILES
    for turn in range(NUMBER, tiles, _GROUPS):
        number, tile = turn // TILES, turn % TILES
        item = gl.program_id(0) + number * gl.num_programs(0)
        step = number % HEADS
        # No group is so far ahead that it could take the filling before the last for its own: there are two tiles a head or more.
        mbarrier.wait(ready.index(step), number // HEADS & 1)
        q = qs.index(step * TILES + tile).reshape([TILE, WIDTH])
        k, v = ks.index(step).reshape([ks.shape[2], WIDTH]), vs.index(step).reshape([ks.shape[2], WIDTH])
        s1, s2 = _scores(q, k, 0, ONE), _scores(q, k, ONE, TWO)
        if THREE > 0:
            s3 = _scores(q, k, ONE + TWO, THREE)
            s1, s2, s3 = warpgroup_mma_wait(num_outstanding=0, deps=(s1, s2, s3))
        else:
            s1, s2 = warpgroup_mma_wait(num_outstanding=0, deps=(s1, s2))
        s2 = _known(s2, ONE, keys)
        top = gl.maximum(_highest(s1, ROW), _highest(s2, ROW))
        if THREE > 0:
            s3 = _known(s3, ONE + TWO, keys)
            top = gl.maximum(top, _highest(s3, ROW))
        top *= per_log2
        total, value = gl.zeros([TILE], gl.float32, ROW), gl.zeros([TILE, WIDTH], gl.float32, OUT)
        total, value = _weigh(s1, v, top, per_log2, total, value, 0, OUT)
        total, value = _weigh(s2, v, top, per_log2, total, value, ONE, OUT)
        if THREE > 0:
            total, value = _weigh(s3, v, top, per_log2, total, value, ONE + TWO, OUT)
        tma.store_wait(0)  # the room may still be read
        value = warpgroup_mma_wait(num_outstanding=0, deps=(value,))
        mbarrier.arrive(free.index(step))
        value *= (1.0 / total)[:, None]
        room.store(value.to(v.dtype).reshape([1, TILE, WIDTH]))
        fence_async_shared()
        store_tile(out, [item // heads, tile * TILE, item % heads * WIDTH], room)
        if lse is not None:
            query = tile * TILE + gl.arange(0, TILE, ROW)
            level = (top + gl.log2(total)) * 0.6931471805599453
            gl.store(lse + item.to(gl.int64) * keys + query, level, mask=query < keys)
    tma.store_wait(0)


@gluon.jit
def _attention_hopper_kernel(
    few, many, out, lse, per_log2, total,
    keys: gl.constexpr, heads: gl.constexpr, TILES: gl.constexpr, ONE: gl.constexpr, TWO: gl.constexpr, THREE: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    qs, ks, vs, rooms = rooms_for(HEADS * TILES, few), rooms_for(HEADS, many), rooms_for(HEADS, many), rooms_for(_GROUPS, out)
    ready, free = barriers(HEADS), barriers(HEADS, TILES)
    given = (qs, ks, vs, ready, free, rooms, out, lse, per_log2, total)
    gl.warp_specialize(
        [
            (_group, (given, 0, keys, heads, TILES, ONE, TWO, THREE)),
            (_group, (given, 1, keys, heads, TILES, ONE, TWO, THREE)),
            (_group, (given, 2, keys, heads, TILES, ONE, TWO, THREE)),
            (_fetch, (few, many, qs, ks, vs, ready, free, total, heads, TILES)),
        ],
        _WORKERS,
        _REGISTERS,
    )


def attention_in_turns(qkv: Tensor, heads: int, *, learns: bool, programs: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Attention over queries, keys and values side by side [image, token, 3 · width], as `attention_forward.attention` has it.

    The logarithms of softmax's denominators are left out where nothing learns from them. `programs` share all heads; None: one
    on each multiprocessor.
    """
    images, tokens, width = *qkv.shape[:2], qkv.shape[2] // 3
    out = torch.empty(images, tokens, width, dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(images, heads, tokens, dtype=torch.float32, device=qkv.device) if learns else None
    one, two, three = split_pow2(tokens)
    _attention_hopper_kernel[(min(programs or num_sms(qkv.device), images * heads),)](
        _described(qkv, _TILE), _described(qkv, _PADDED), _described(out, _TILE), lse,
        (width // heads) ** -0.5 * 1.4426950408889634, images * heads,
        keys=tokens, heads=heads, TILES=ceil_div(tokens, _TILE), ONE=one, TWO=two, THREE=three, HEADS=_HEADS,
        num_warps=4, maxnreg=128,
    )  # fmt: skip
    return out, lse


def _described(tokens: Tensor, count: int) -> TensorDescriptor:
    """Tokens [image, token, width] as the GPU's copying unit wants them: so many of one image and head are copied at once."""
    return TensorDescriptor.from_tensor(tokens, [1, count, _TILE], _LAYOUT)
