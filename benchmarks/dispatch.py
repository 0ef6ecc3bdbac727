"""What it costs on the CPU to decide whether a block is fused: microseconds per block, and once per forward pass.

    python benchmarks/dispatch.py

No GPU is needed: the decision reads Python objects only. The aim is 8 µs per block.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import vitrail
from vitrail.models.fused import dispatch, whitelist


def main() -> None:
    model = vitrail.create_model("ViT-S/16", seed=0)
    block = model.blocks[0]  # not within what is measured: looking it up takes 2 µs
    x = torch.zeros(2, 197, 384, dtype=torch.bfloat16)
    shape = whitelist.shape_of_block(block)
    assert shape is not None
    passed = {(x.device, x.dtype, *shape)}  # as the self-test's answers are kept
    dispatch._kernels_run = lambda x, dtype: True
    dispatch._block_runs = lambda shape, x, dtype: (x.device, dtype, *shape) in passed
    print(f"per block, whitelist.is_plain_block: {microseconds(lambda: whitelist.is_plain_block(block)):.1f} µs")
    fuses = dispatch.fuses_block
    print(f"per block, all of it, autocast:      {microseconds(lambda: fuses(block, x, x.dtype, uses_autocast=True)):.1f} µs")
    block.to(x.dtype)
    print(f"per block, weights in bf16:          {microseconds(lambda: fuses(block, x, x.dtype, uses_autocast=False)):.1f} µs")
    print(f"per forward pass:                    {microseconds(lambda: dispatch.can_fuse(x)):.1f} µs")


def microseconds(call: Callable[[], object], repeats: int = 20_000, rounds: int = 7) -> float:
    """CPU time of the fastest of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, time.process_time() - start)
    return best / repeats * 1e6


if __name__ == "__main__":
    main()
