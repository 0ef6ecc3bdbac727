"""A warmed-up model under test, and the rounds it has run so far."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.bench.plan import OURS
from vitrail.bench.power import PowerMonitor
from vitrail.bench.timer import Timer
from vitrail.bench.workload import Case, Inputs, Workload, build_workload, parameter_note
from vitrail.models.cost import flops, needed_flops

_ROUND_SECONDS = 0.5
_MAX_STEPS = 200  # per round


@dataclasses.dataclass(frozen=True)
class Round:
    """One timed round; `latencies` has the seconds of each call if latency is measured."""

    seconds: float
    latencies: tuple[float, ...] = ()
    mhz: float | None = None
    watts: float | None = None


class Entry:
    """One library and mode in a comparison. The constructor builds and warms up, and raises what the first steps raise."""

    def __init__(self, case: Case, inputs: Inputs, timer: Timer, power: PowerMonitor, steps: int | None) -> None:
        self.case, self.timer, self.power = case, timer, power
        images = inputs.for_case(case)
        memory = MemoryUse(case.device)
        self.workload: Workload = build_workload(case, inputs)
        self._last: Tensor = images
        self.first_step, steady = timer.warm_up(self._step)
        self.steps = steps or max(1, min(_MAX_STEPS, round(_ROUND_SECONDS / max(steady, 1e-6))))
        self.peak_bytes, self.resident_bytes = memory.measure(timer, self._step)
        self.peak_bytes = None if self.peak_bytes is None else self.peak_bytes + images.nbytes
        self.rounds: list[Round] = []
        self.finite = self._is_finite()
        self.interleaved_with = 0

    def run_round(self) -> None:
        """Time one round, then check that its outputs are finite."""
        self._step()  # not timed: it allocates again what the other entries have freed
        start, latencies = time.monotonic(), []
        if self.case.metric == "latency":
            latencies = self.timer.latencies(self._step, self.steps)
            seconds = sum(latencies)
        else:
            seconds = self.timer.total(self._step, self.steps)
        self.rounds.append(Round(seconds, tuple(latencies), *self.power.medians(start, time.monotonic())))
        self.finite = self._is_finite() and self.finite

    def _step(self) -> None:
        self._last = self.workload.step()

    def _is_finite(self) -> bool:
        return self.workload.is_finite(self._last)

    def results(self, peak: float) -> dict[str, Any]:
        """Return the fields of a `Row` that this entry has measured; `peak` is the matmul peak in FLOP/s."""
        case, images = self.case, self.steps * self.case.batch
        rates = [images / one.seconds for one in self.rounds]
        latencies = sorted(seconds for one in self.rounds for seconds in one.latencies)
        found: dict[str, Any] = {}
        images_per_s = statistics.median(rates)
        if latencies:
            median = statistics.median(latencies)
            images_per_s = case.batch / median
            found = {"p50_ms": 1000 * median, "p95_ms": 1000 * latencies[int(0.95 * (len(latencies) - 1))]}
        flops_per_s = images_per_s * flops_per_image(case)
        return found | {
            "images_per_s": images_per_s,
            "min_images_per_s": min(rates),
            "max_images_per_s": max(rates),
            "tflops": flops_per_s / 1e12,
            "peak_tflops": peak / 1e12,
            "peak_fraction": flops_per_s / peak,
            "peak_memory_gib": None if self.peak_bytes is None else self.peak_bytes / 2**30,
            "first_step_s": self.first_step,
            "clock_mhz": _median(one.mhz for one in self.rounds),
            "watts": _median(one.watts for one in self.rounds),
            "finite": self.finite,
            "rounds": len(self.rounds),
            "steps": self.steps,
            "interleaved_with": self.interleaved_with,
            "parameters": self.workload.parameters,
            "note": "; ".join(filter(None, (parameter_note(case, self.workload), self.workload.note()))),
        }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def flops_per_image(case: Case) -> int:
    """Return the FLOPs a step does per image. Ours skips the last block's work that no logit depends on; the others do it."""
    forward = needed_flops(case.config) if case.library == OURS else flops(case.config)
    return 3 * forward if case.task == "train" else forward  # backward takes twice as many


class MemoryUse:
    """Measure the GPU memory used since this object was created; on a CPU there is nothing to measure."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._allocated, self._reserved = self._now()

    def measure(self, timer: Timer, work: Callable[[], None]) -> tuple[int | None, int]:
        """Return the peak bytes during a step and the bytes held between steps, private pools of CUDA graphs included."""
        if self.device.type != "cuda":
            return None, 0
        torch.cuda.reset_peak_memory_stats(self.device)
        timer.total(work, 1)
        allocated = torch.cuda.max_memory_allocated(self.device) - self._allocated
        torch.cuda.empty_cache()
        resident = self._now()[1] - self._reserved
        return max(allocated, resident), resident

    def _now(self) -> tuple[int, int]:
        if self.device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)


def exceeds_memory(entries: Sequence[Entry], available: float) -> bool:
    """Return whether the peak of one entry, added to what the others hold between steps, exceeds the available bytes."""
    held = sum(entry.resident_bytes for entry in entries)
    return held + max((entry.peak_bytes or 0) - entry.resident_bytes for entry in entries) > available


def available_memory(device: torch.device) -> float:
    """Return the bytes that are free or reserved by this process, less 5 % for fragmentation."""
    if device.type != "cuda":
        return math.inf
    return 0.95 * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))


def check_fits(case: Case, timer: Timer) -> None:
    """Run a few steps, until all lasting buffers are allocated; raise if memory runs out."""
    workload = build_workload(case, Inputs(case.config, case.batch, case.device))
    for _ in range(5 if case.captures else 2):
        workload.step()
    timer.synchronize()
