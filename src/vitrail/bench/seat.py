"""A subject that has been warmed up and takes its turns, and what its turns have shown so far."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.bench.clock import Clock
from vitrail.bench.meter import Meter
from vitrail.bench.plan import OURS
from vitrail.bench.subjects import Case, Inputs, Subject, count_note, prepare
from vitrail.models.cost import flops, needed_flops

_ROUND = 0.5  # seconds
_STEPS = 200  # at most, a round


@dataclasses.dataclass(frozen=True)
class Turn:
    """One round: its seconds, and for latency those of each call."""

    seconds: float
    calls: tuple[float, ...] = ()
    megahertz: float | None = None
    watts: float | None = None


class Seat:
    """Built and warmed up by its constructor, which raises what the first steps raise."""

    def __init__(self, case: Case, inputs: Inputs, clock: Clock, meter: Meter, steps: int | None) -> None:
        self.case, self.clock, self.meter = case, clock, meter
        images = inputs.for_case(case)
        memory = Memory(case.device)
        self.subject: Subject = prepare(case, inputs)
        self._last: Tensor = images
        self.first_step, steady = clock.warm(self._step)
        self.steps = steps or max(1, min(_STEPS, round(_ROUND / max(steady, 1e-6))))
        self.peak, self.resident = memory.measured(clock, self._step)
        self.peak = None if self.peak is None else self.peak + images.nbytes
        self.turns: list[Turn] = []
        self.finite = self._is_finite()
        self.others = 0

    def take_turn(self) -> None:
        """One round, and a look at its numbers once the time is taken."""
        self._step()  # not counted: it takes the memory back that others have used since
        began, calls = time.monotonic(), []
        if self.case.measure == "latency":
            calls = self.clock.each(self._step, self.steps)
            seconds = sum(calls)
        else:
            seconds = self.clock.steps(self._step, self.steps)
        self.turns.append(Turn(seconds, tuple(calls), *self.meter.between(began, time.monotonic())))
        self.finite = self._is_finite() and self.finite

    def _step(self) -> None:
        self._last = self.subject.step()

    def _is_finite(self) -> bool:
        return self.subject.finite(self._last)

    def figures(self, ceiling: float) -> dict[str, Any]:
        """The fields of a row that this seat knows."""
        case, count = self.case, self.steps * self.case.batch
        rates = [count / turn.seconds for turn in self.turns]
        calls = sorted(call for turn in self.turns for call in turn.calls)
        found: dict[str, Any] = {}
        middle = statistics.median(rates)
        if calls:
            middle = case.batch / statistics.median(calls)
            found = {"p50_ms": 1000 * statistics.median(calls), "p95_ms": 1000 * calls[int(0.95 * (len(calls) - 1))]}
        arithmetic = middle * arithmetic_of(case)
        return found | {
            "images_per_s": middle,
            "slowest": min(rates),
            "fastest": max(rates),
            "tflops": arithmetic / 1e12,
            "ceiling_tflops": ceiling / 1e12,
            "ceiling_share": arithmetic / ceiling,
            "peak_gib": None if self.peak is None else self.peak / 2**30,
            "first_step_s": self.first_step,
            "clock_mhz": _median(turn.megahertz for turn in self.turns),
            "watts": _median(turn.watts for turn in self.turns),
            "finite": self.finite,
            "rounds": len(self.turns),
            "steps": self.steps,
            "turns_with": self.others,
            "parameters": self.subject.parameters,
            "note": "; ".join(filter(None, (count_note(case, self.subject), self.subject.remark()))),
        }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def arithmetic_of(case: Case) -> int:
    """Operations a step spends on one image. Ours leaves out what the logits are not read from; the peers compute it."""
    forward = needed_flops(case.config) if case.who == OURS else flops(case.config)
    return 3 * forward if case.task == "train" else forward  # backward takes twice as many


class Memory:
    """What a subject takes of a GPU's memory, from here on; a processor does not keep count."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._allocated, self._reserved = self._now()

    def measured(self, clock: Clock, work: Callable[[], None]) -> tuple[int | None, int]:
        """The most bytes held at any moment of a step, and those held between steps.

        Recorded steps keep memory of their own, which counts as well.
        """
        if self.device.type != "cuda":
            return None, 0
        torch.cuda.reset_peak_memory_stats(self.device)
        clock.steps(work, 1)
        allocated = torch.cuda.max_memory_allocated(self.device) - self._allocated
        torch.cuda.empty_cache()
        resident = self._now()[1] - self._reserved
        return max(allocated, resident), resident

    def _now(self) -> tuple[int, int]:
        if self.device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)


def crowded(seats: Sequence[Seat], room: float) -> bool:
    """Whether one of them, at its peak, would find too little room beside what the others hold between their steps."""
    held = sum(seat.resident for seat in seats)
    return held + max((seat.peak or 0) - seat.resident for seat in seats) > room


def room_on(device: torch.device) -> float:
    """Bytes that may be planned with: what is free or ours already, less a little for fragments."""
    if device.type != "cuda":
        return math.inf
    return 0.95 * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))


def fits(case: Case, clock: Clock) -> None:
    """Take steps until everything is there that steps leave behind; raises if memory does not suffice."""
    subject = prepare(case, Inputs(case.config, case.batch, case.device))
    for _ in range(5 if case.records else 2):
        subject.step()
    clock.wait()
