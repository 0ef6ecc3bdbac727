"""Reproducible numbers on the same machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use so many CPU threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Refuse operations that may round differently from run to run, attention kernels among them, while the block runs."""
    if not enabled:
        yield
        return
    kernels = torch.backends.cuda
    before = torch.are_deterministic_algorithms_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.cudnn_sdp_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    kernels.enable_mem_efficient_sdp(False)  # its backward pass adds up in no fixed order; flash and plain attention can
    kernels.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        kernels.enable_mem_efficient_sdp(before[1])
        kernels.enable_cudnn_sdp(before[2])
