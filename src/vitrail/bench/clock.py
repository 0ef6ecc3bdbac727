"""Time, as the device sees it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]

_STEADY = 0.05  # two warm-up steps that differ by less than this share are steady
_WARM = (3, 20)  # at least, and at most, so many warm-up steps
_PATIENCE = 10.0  # seconds of warming up


class Clock:
    """Times work on one device. Inside a round the host runs ahead of the device and never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Until the device has done everything it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def steps(self, work: Work, count: int) -> float:
        """Seconds that `count` steps take; on a GPU between two events in its own stream."""
        self.wait()
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._on_gpu(work, count) if self.device.type == "cuda" else self._on_host(work, count)
        finally:
            if collecting:
                gc.enable()

    def _on_gpu(self, work: Work, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _on_host(self, work: Work, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            work()
        self.wait()
        return time.perf_counter() - begin

    def each(self, work: Work, count: int) -> list[float]:
        """Seconds of each call until its answer is there, as one who waits for it sees them."""
        return [self.once(work) for _ in range(count)]

    def once(self, work: Work) -> float:
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin

    def warm(self, work: Work) -> tuple[float, float]:
        """Seconds of the very first step, compilation included, and of a step once they are steady."""
        first = self.once(work)
        began, times = time.perf_counter(), [self.once(work)]
        while len(times) < _WARM[1] and time.perf_counter() - began < _PATIENCE:
            times.append(self.once(work))
            if len(times) >= _WARM[0] and abs(times[-1] / times[-2] - 1) < _STEADY:
                break
        return first, times[-1]
