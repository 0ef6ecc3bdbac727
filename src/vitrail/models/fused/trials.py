"""Try every kernel on a device, for a report: which run there and are right, which are not used, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vitrail.models.fused.launch import has_fp8_matmuls, has_triton, sm_major
from vitrail.models.fused.self_test import TOLERANCE, TransientError, fault

Result = Literal["passed", "failed", "not used", "not tried"]
_WIDTH, _MLP, _HEADS = 768, 3072, 12  # of ViT-B
_TOKENS = (50, 197)  # of patches of 32 and 16 at 224 pixels
_NEEDS_LARGE_GPU = "torch's attention is used: this one needs Hopper or a large Blackwell (compute capability 9.0 or 10.0)"
_NEEDS_FP8 = "this GPU has no fp8 matmuls (compute capability 8.9)"
_NEEDS_HOPPER = "written for Hopper (compute capability 9.0)"


@dataclass(frozen=True)
class KernelTrial:
    """What came of trying one kernel, or a group that is used together."""

    kernel: str
    result: Result
    """passed; failed: wrong or does not run, torch's is used; not used: for other devices; not tried: memory was short, say."""
    reason: str = ""
    seconds: float = 0.0
    """Including compilation."""


@dataclass(frozen=True)
class _Case:
    kernel: str
    difference: Callable[[], float]
    tolerance: float = TOLERANCE
    not_used: str = ""


def why_no_kernels(device: torch.device) -> str:
    """Say why none of the kernels run on a device; empty if they can."""
    if device.type != "cuda":
        return f"the kernels are for CUDA GPUs, not for {device.type}"
    return "" if has_triton() else "Triton is not installed"


def try_kernels(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[KernelTrial]:
    """Compile every kernel, run it and compare it with torch, as before its first use."""
    return [] if why_no_kernels(device) else [_try(device, case) for case in _cases(device, dtype)]


def _try(device: torch.device, case: _Case) -> KernelTrial:
    if case.not_used:
        return KernelTrial(case.kernel, "not used", case.not_used)
    start = time.monotonic()
    try:
        reason = fault(device, case.tolerance, case.difference)
    except TransientError as error:
        return KernelTrial(case.kernel, "not tried", str(error), time.monotonic() - start)
    return KernelTrial(case.kernel, "failed" if reason else "passed", reason, time.monotonic() - start)


def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[_Case]:
    """Yield the checks of `self_test.py` and `selection.py`, each by itself."""
    from vitrail.models.fused import selection
    from vitrail.models.fused import self_test_cases as cases
    from vitrail.models.fused.attention_backward import fits

    here = device, dtype
    yield _Case("patchify", lambda: cases.patchify_difference(*here))
    yield _Case("prefix tokens and positions", lambda: cases.prefix_difference(*here))
    yield _Case("cross-entropy", lambda: cases.loss_difference(*here))
    sizes = _WIDTH, _MLP, _HEADS
    yield _Case("block of ViT-B, erf GELU", lambda: cases.blocks_difference(*here, *sizes, False), 0.0)
    yield _Case("block of ViT-B, tanh GELU", lambda: cases.blocks_difference(*here, *sizes, True), 0.0)
    yield _Case("block of ViT-B with qk_norm", lambda: cases.blocks_difference(*here, *sizes, False, qk_norm=True), 0.0)
    for tokens in _TOKENS:
        few = "" if fits(tokens, _WIDTH // _HEADS, device) else _NEEDS_LARGE_GPU
        shape = tokens, tokens, _HEADS, _WIDTH // _HEADS, True, False
        yield _Case(f"attention over {tokens} tokens", _bound(cases.attention_difference, *here, *shape), not_used=few)
    hopper = "" if sm_major(device) == 9 else _NEEDS_HOPPER
    for name, difference in selection.hopper_differences(device, dtype, _TOKENS[-1], _HEADS).items():
        yield _Case(name, difference, selection.TOLERANCE, hopper)
    fp8 = "" if has_fp8_matmuls(device) else _NEEDS_FP8
    yield _Case("fp8 matmuls", lambda: cases.blocks_difference(device, torch.bfloat16, 64, 96, 2, False, fp8=True), 0.0, fp8)


def _bound(difference: Callable[..., float], *arguments: Any) -> Callable[[], float]:
    return lambda: difference(*arguments)
