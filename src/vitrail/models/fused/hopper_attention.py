"""Attention's forward pass over 129 to 224 tokens on Hopper GPUs: warp-specialised, persistent, with all keys in shared memory.

Three consumer warpgroups take tiles of 64 queries alternately, so that nearly always one of them runs matmuls while others compute
exponentials. A producer warp loads queries, keys and values of the next head by TMA meanwhile. Softmax needs no rescaling: all
scores of a query are in registers at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitrail.models.fused.attention_forward import split_pow2
from vitrail.models.fused.hopper_pingpong import alloc_mbarriers, alloc_smem, tma_load, tma_store
from vitrail.models.fused.launch import ceil_div, num_sms
from vitrail.models.fused.ops import attention_flops, op

_BLOCK_M = 64  # queries of one tile; also the width of a head
_PADDED_KEYS = 256  # loaded, of which up to 224 are multiplied
_STAGES = 2  # heads in shared memory at once
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
_CONSUMERS = gl.constexpr(3)
_WORKER_WARPS = gl.constexpr([4, 4, 1])
_WORKER_REGISTERS = gl.constexpr([160, 160, 24])


@gluon.jit
def _producer(q_tiles, kv_tiles, q_smem, k_smem, v_smem, full, empty, num_items, heads: gl.constexpr, TILES: gl.constexpr):
    """Run the producer warp: load every (image, head) of this program, each as soon as its stage is empty."""
    STAGES: gl.constexpr = k_smem.shape[0]
    WIDTH: gl.constexpr = k_smem.shape[3]
    BYTES: gl.constexpr = (TILES * q_smem.shape[2] + 2 * k_smem.shape[2]) * WIDTH * k_smem.dtype.primitive_bitwidth // 8
    stage, phase = 0, 1
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        image, column = item // heads, item % heads * WIDTH
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), BYTES)
        tma_load(kv_tiles, [image, 0, heads * WIDTH + column], full.index(stage), k_smem.index(stage))
        for tile in gl.static_range(TILES):
            tma_load(q_tiles, [image, tile * q_smem.shape[2], column], full.index(stage), q_smem.index(stage * TILES + tile))
        tma_load(kv_tiles, [image, 0, 2 * heads * WIDTH + column], full.index(stage), v_smem.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _scores(q, k, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Start the matmul of queries with COUNT keys from the FIRST."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    QUERIES: gl.constexpr = q.shape[0]
    zero = gl.zeros([QUERIES, COUNT], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.slice(FIRST, COUNT, 0).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _mask_padding(scores, FIRST: gl.constexpr, keys: gl.constexpr):
    if FIRST + scores.shape[1] > keys:
        key = FIRST + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = gl.where((key < keys)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _row_max(scores, ROW: gl.constexpr):
    return gl.convert_layout(gl.max(scores, axis=1), ROW)


@gluon.jit
def _accumulate(scores, v, row_max, log2_scale, denominator, acc, FIRST: gl.constexpr, OUT: gl.constexpr):
    """Add some keys' exponentials to the softmax denominator and, in flight, their weighted values to the accumulator."""
    p = gl.exp2(scores * log2_scale - gl.convert_layout(row_max, gl.SliceLayout(1, scores.type.layout))[:, None])
    denominator += gl.convert_layout(gl.sum(p, axis=1), gl.SliceLayout(1, OUT))
    p_low = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, OUT, 2))
    return denominator, warpgroup_mma(p_low, v.slice(FIRST, scores.shape[1], 0), acc, is_async=True)


@gluon.jit
def _consumer(
    args, CONSUMER: gl.constexpr, keys: gl.constexpr, heads: gl.constexpr, TILES: gl.constexpr,
    KEYS1: gl.constexpr, KEYS2: gl.constexpr, KEYS3: gl.constexpr,
):  # fmt: skip
    """Run one of the consumer warpgroups: every third tile of this program, with all keys in two or three pieces."""
    q_smem, k_smem, v_smem, full, empty, out_smem, out, lse, log2_scale, num_items = args
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[2]
    WIDTH: gl.constexpr = k_smem.shape[3]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    my_out_smem = out_smem.index(CONSUMER)
    num_tiles = gl.cdiv(num_items - gl.program_id(0), gl.num_programs(0)) * TILES
    for index in range(CONSUMER, num_tiles, _CONSUMERS):
        number, tile = index // TILES, index % TILES
        item = gl.program_id(0) + number * gl.num_programs(0)
        stage = number % STAGES
        # One phase bit is enough: with two tiles or more per head no consumer gets two fillings of a stage ahead.
        mbarrier.wait(full.index(stage), number // STAGES & 1)
        q = q_smem.index(stage * TILES + tile).reshape([BLOCK_M, WIDTH])
        k, v = k_smem.index(stage).reshape([k_smem.shape[2], WIDTH]), v_smem.index(stage).reshape([k_smem.shape[2], WIDTH])
        s1, s2 = _scores(q, k, 0, KEYS1), _scores(q, k, KEYS1, KEYS2)
        if KEYS3 > 0:
            s3 = _scores(q, k, KEYS1 + KEYS2, KEYS3)
            s1, s2, s3 = warpgroup_mma_wait(num_outstanding=0, deps=(s1, s2, s3))
        else:
            s1, s2 = warpgroup_mma_wait(num_outstanding=0, deps=(s1, s2))
        s2 = _mask_padding(s2, KEYS1, keys)
        row_max = gl.maximum(_row_max(s1, ROW), _row_max(s2, ROW))
        if KEYS3 > 0:
            s3 = _mask_padding(s3, KEYS1 + KEYS2, keys)
            row_max = gl.maximum(row_max, _row_max(s3, ROW))
        row_max *= log2_scale
        denominator, acc = gl.zeros([BLOCK_M], gl.float32, ROW), gl.zeros([BLOCK_M, WIDTH], gl.float32, OUT)
        denominator, acc = _accumulate(s1, v, row_max, log2_scale, denominator, acc, 0, OUT)
        denominator, acc = _accumulate(s2, v, row_max, log2_scale, denominator, acc, KEYS1, OUT)
        if KEYS3 > 0:
            denominator, acc = _accumulate(s3, v, row_max, log2_scale, denominator, acc, KEYS1 + KEYS2, OUT)
        tma.store_wait(0)  # the last store may still be reading the buffer
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(stage))
        acc *= (1.0 / denominator)[:, None]
        my_out_smem.store(acc.to(v.dtype).reshape([1, BLOCK_M, WIDTH]))
        fence_async_shared()
        tma_store(out, [item // heads, tile * BLOCK_M, item % heads * WIDTH], my_out_smem)
        if lse is not None:
            query = tile * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
            row_lse = (row_max + gl.log2(denominator)) * 0.6931471805599453
            gl.store(lse + item.to(gl.int64) * keys + query, row_lse, mask=query < keys)
    tma.store_wait(0)


@gluon.jit
def _hopper_attention_kernel(
    q_tiles, kv_tiles, out, lse, log2_scale, num_items,
    keys: gl.constexpr, heads: gl.constexpr, TILES: gl.constexpr, KEYS1: gl.constexpr, KEYS2: gl.constexpr, KEYS3: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, out_smem = alloc_smem(STAGES * TILES, q_tiles), alloc_smem(_CONSUMERS, out)
    k_smem, v_smem = alloc_smem(STAGES, kv_tiles), alloc_smem(STAGES, kv_tiles)
    full, empty = alloc_mbarriers(STAGES), alloc_mbarriers(STAGES, TILES)
    args = (q_smem, k_smem, v_smem, full, empty, out_smem, out, lse, log2_scale, num_items)
    gl.warp_specialize(
        [
            (_consumer, (args, 0, keys, heads, TILES, KEYS1, KEYS2, KEYS3)),
            (_consumer, (args, 1, keys, heads, TILES, KEYS1, KEYS2, KEYS3)),
            (_consumer, (args, 2, keys, heads, TILES, KEYS1, KEYS2, KEYS3)),
            (_producer, (q_tiles, kv_tiles, q_smem, k_smem, v_smem, full, empty, num_items, heads, TILES)),
        ],
        _WORKER_WARPS,
        _WORKER_REGISTERS,
    )


def _empty_outputs(qkv: Tensor, heads: int, needs_grad: bool, programs: int | None = None) -> tuple[Tensor, Tensor]:
    images, tokens, width = *qkv.shape[:2], qkv.shape[2] // 3
    shape = (images, heads, tokens) if needs_grad else (0,)
    return qkv.new_empty(images, tokens, width), qkv.new_empty(shape, dtype=torch.float32)


@op(
    "hopper_attention(Tensor qkv, int heads, bool needs_grad, int? programs=None) -> (Tensor, Tensor)",
    _empty_outputs,
    lambda qkv, *rest, **named: attention_flops(qkv, None),
)
def hopper_attention(qkv: Tensor, heads: int, needs_grad: bool, programs: int | None = None) -> tuple[Tensor, Tensor]:
    """Attention over queries, keys and values side by side [image, token, 3 · width].

    Returns the output [image, token, width] and softmax's logsumexp [image, head, token] in float32, which is empty without
    `needs_grad`. `programs` share all heads; default: one per SM.
    """
    images, tokens, width = *qkv.shape[:2], qkv.shape[2] // 3
    out, lse = _empty_outputs(qkv, heads, needs_grad)
    keys1, keys2, keys3 = split_pow2(tokens)
    _hopper_attention_kernel[(min(programs or num_sms(qkv.device), images * heads),)](
        _tma_descriptor(qkv, _BLOCK_M), _tma_descriptor(qkv, _PADDED_KEYS), _tma_descriptor(out, _BLOCK_M),
        lse if needs_grad else None, (width // heads) ** -0.5 * 1.4426950408889634, images * heads,
        keys=tokens, heads=heads, TILES=ceil_div(tokens, _BLOCK_M), KEYS1=keys1, KEYS2=keys2, KEYS3=keys3, STAGES=_STAGES,
        num_warps=4, maxnreg=128,
    )  # fmt: skip
    return out, lse


def _tma_descriptor(tokens: Tensor, count: int) -> TensorDescriptor:
    """Describe tokens [image, token, width] to the TMA unit, which copies `count` tokens of one image and head at once."""
    return TensorDescriptor.from_tensor(tokens, [1, count, _BLOCK_M], _LAYOUT)
