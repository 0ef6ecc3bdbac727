"""Time work on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]

_STEADY = 0.05  # warm-up ends once two steps in a row differ by less than this fraction
_MIN_WARMUP, _MAX_WARMUP = 3, 20  # steps
_MAX_WARMUP_SECONDS = 10.0


class Timer:
    """Time work on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def total(self, work: Work, count: int) -> float:
        """Return the seconds that `count` calls take together.

        The host does not wait for the device between calls. On a GPU the time is taken between two events in its stream.
        """
        self.synchronize()
        gc_was_enabled = gc.isenabled()
        gc.disable()
        try:
            return self._on_gpu(work, count) if self.device.type == "cuda" else self._on_host(work, count)
        finally:
            if gc_was_enabled:
                gc.enable()

    def _on_gpu(self, work: Work, count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def _on_host(self, work: Work, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            work()
        self.synchronize()
        return time.perf_counter() - start

    def latencies(self, work: Work, count: int) -> list[float]:
        """Return the latency of each of `count` calls."""
        return [self.latency(work) for _ in range(count)]

    def latency(self, work: Work) -> float:
        """Return the seconds from the call until its result is ready."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def warm_up(self, work: Work) -> tuple[float, float]:
        """Run until step times are steady; return the seconds of the first step (with compilation) and of a steady one."""
        first = self.latency(work)
        start, times = time.perf_counter(), [self.latency(work)]
        while len(times) < _MAX_WARMUP and time.perf_counter() - start < _MAX_WARMUP_SECONDS:
            times.append(self.latency(work))
            if len(times) >= _MIN_WARMUP and abs(times[-1] / times[-2] - 1) < _STEADY:
                break
        return first, times[-1]
