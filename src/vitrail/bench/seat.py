"""A subject that has been warmed up and takes its turns, and what its turns have shown so far."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch
from torch import Tensor

from vitrail.bench.clock import Clock
from vitrail.bench.subjects import Case, Inputs, Subject, count_note, prepare
from vitrail.models import flops
from vitrail.train.speed import training_flops

_ROUND = 0.5  # seconds
_STEPS = 200  # at most, a round


@dataclasses.dataclass(frozen=True)
class Turn:
    """One round: its seconds, and for latency those of each call."""

    seconds: float
    calls: tuple[float, ...] = ()


class Seat:
    """Built and warmed up by its constructor, which raises what the first steps raise."""

    def __init__(self, case: Case, inputs: Inputs, clock: Clock, steps: int | None) -> None:
        self.case, self.clock = case, clock
        images = inputs.for_case(case)
        before = _allocated(case.device)
        self.subject: Subject = prepare(case, inputs)
        self._last: Tensor = images
        self.first_step, steady = clock.warm(self._step)
        self.steps = steps or max(1, min(_STEPS, round(_ROUND / max(steady, 1e-6))))
        self.peak = _peak(case.device, clock, self._step, before - images.nbytes)
        self.turns: list[Turn] = []
        self.finite = self._is_finite()
        self.others = 0

    def take_turn(self) -> None:
        """One round, and a look at its numbers once the time is taken."""
        if self.case.measure == "latency":
            calls = self.clock.each(self._step, self.steps)
            self.turns.append(Turn(sum(calls), tuple(calls)))
        else:
            self.turns.append(Turn(self.clock.steps(self._step, self.steps)))
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
        arithmetic = middle * (training_flops(case.config) if case.task == "train" else flops(case.config))
        return found | {
            "images_per_s": middle,
            "slowest": min(rates),
            "fastest": max(rates),
            "tflops": arithmetic / 1e12,
            "ceiling_tflops": ceiling / 1e12,
            "ceiling_share": arithmetic / ceiling,
            "peak_gib": None if self.peak is None else self.peak / 2**30,
            "first_step_s": self.first_step,
            "finite": self.finite,
            "rounds": len(self.turns),
            "steps": self.steps,
            "turns_with": self.others,
            "parameters": self.subject.parameters,
            "note": count_note(case, self.subject),
        }


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device, clock: Clock, work: Any, before: int) -> int | None:
    """The most bytes held at any moment of a step, beyond `before`; a processor does not keep count."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    clock.steps(work, 1)
    return torch.cuda.max_memory_allocated(device) - before


def fits(case: Case, clock: Clock) -> None:
    """Take two steps, the second with everything the first leaves behind; raises if memory does not suffice."""
    subject = prepare(case, Inputs(case.config, case.batch, case.device))
    for _ in range(2):
        subject.step()
    clock.wait()
