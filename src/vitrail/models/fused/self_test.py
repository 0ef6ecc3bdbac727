"""Check, before kernels are first used on a device, that they run there and compute the right thing.

GPUs, drivers and versions of Triton differ more than any test suite can cover. A kernel that does not compile, or is wrong, must
cost speed and not a training run. What is compared is in `self_test_cases.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch

from vitrail.models.fused import self_test_cases as cases

log = logging.getLogger("vitrail")

P = ParamSpec("P")
R = TypeVar("R")

TOLERANCE = 0.05  # relative error of a row in low precision
_RETRY_SECONDS = 10.0  # after a transient failure
_TRANSIENT = (
    "out of memory", "alloc_failed", "busy or unavailable", "are busy", "is capturing", "during capture", "not permitted when",
)  # fmt: skip


class TransientError(Exception):
    """A check could not be made now, and says nothing about the kernels."""


def remember(default: Callable[[str], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache a check's answers by its arguments.

    After a `TransientError` the answer is `default(reason)`, and the next call after some seconds checks again.
    """

    def decorate(check: Callable[P, R]) -> Callable[P, R]:
        answers: dict[Any, R] = {}
        retry_at: dict[Any, tuple[float, str]] = {}

        @functools.wraps(check)
        def cached(*args: P.args, **kwargs: P.kwargs) -> R:
            key = (args, tuple(kwargs.items())) if kwargs else args
            if key in answers:
                return answers[key]
            due, reason = retry_at.get(key, (0.0, ""))
            if time.monotonic() < due:
                return default(reason)
            try:
                answers[key] = check(*args, **kwargs)
            except TransientError as error:
                log.warning("Vitrail's GPU kernels could not be checked now (%s). Using torch's, and checking again later.", error)
                retry_at[key] = time.monotonic() + _RETRY_SECONDS, str(error)
                return default(str(error))
            return answers[key]

        def cache_clear() -> None:
            answers.clear()
            retry_at.clear()

        cached.cache_clear = cache_clear  # type: ignore[attr-defined]
        return cached

    return decorate


def rejected(reason: str) -> bool:
    """Answer no, for checks that could not be made."""
    return False


@remember(rejected)
def works(device: torch.device, dtype: torch.dtype, width: int, mlp: int, heads: int, tanh: bool, qk_norm: bool = False) -> bool:
    """Return whether blocks of this size are right, forward and backward, with and without dropout and stochastic depth."""
    message = f"Vitrail's GPU kernels for width {width} are not used here (%s). Using torch's, which are slower."
    args = device, dtype, width, mlp, heads, tanh
    return passes(device, 0.0, lambda: cases.blocks_difference(*args, qk_norm=qk_norm), message)


@remember(rejected)
def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels around the blocks are right: patches, prefix tokens and positions, cross-entropy."""
    message = "Vitrail's GPU kernels for patches, positions and losses are not used here (%s). Using torch's, which are slower."
    checks = (cases.patchify_difference, cases.prefix_difference, cases.loss_difference)
    return passes(device, TOLERANCE, lambda: max(check(device, dtype) for check in checks), message)


@remember(str)
def fp8_fault(device: torch.device) -> str:
    """Return why fp8 matmuls cannot be used on a device; empty if they can."""
    return fault(device, 0.0, lambda: cases.blocks_difference(device, torch.bfloat16, 64, 96, 2, False, fp8=True))


@remember(rejected)
def attention_works(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, heads: int, channels: int, needs_grad: bool,
    qk_norm: bool = False,
) -> bool:  # fmt: skip
    """Return whether attention over so many tokens is right, with its gradients if needed: every length is compiled separately."""
    message = f"Vitrail's attention kernel for {keys} tokens is not used here (%s). Using torch's."
    args = device, dtype, queries, keys, heads, channels, needs_grad, qk_norm
    return passes(device, TOLERANCE, lambda: cases.attention_difference(*args), message)


def passes(device: torch.device, tolerance: float, difference: Callable[[], float], message: str) -> bool:
    """Return whether kernels have no `fault`; if they have one, log the message with the reason for its %s."""
    reason = fault(device, tolerance, difference)
    if reason:
        log.warning(message, reason)
    return not reason


def fault(device: torch.device, tolerance: float, difference: Callable[[], float]) -> str:
    """Return what is wrong with kernels, given a function that computes their relative error; empty if nothing is.

    The function runs in a thread of its own, where no setting of this thread applies: no autocast, no mode, no saved-tensor hooks.
    Random generators are left as they were. Raises `TransientError` if memory is short or the device is busy.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise TransientError("a CUDA graph is being captured")

    def run() -> float:
        cuda = device.type == "cuda"
        with torch.cuda.device(device) if cuda else contextlib.nullcontext(), torch.random.fork_rng([device] if cuda else []):
            torch.default_generator.manual_seed(0)  # not `torch.manual_seed`: that seeds other GPUs, too
            if cuda:
                torch.cuda.manual_seed(0)
            return difference()

    try:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(run).result()
    except Exception as error:  # whatever it is, there is another path
        text = str(error).strip()
        reason = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text.lower() for words in _TRANSIENT):
            raise TransientError(reason) from error
        return reason
    return "" if found <= tolerance else f"they are off by {found:.1%}"
