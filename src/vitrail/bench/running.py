"""The measurement itself: subjects are built, warmed up, and take turns; rows are kept as they come."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vitrail.bench import peers
from vitrail.bench.ceiling import ceiling
from vitrail.bench.clock import Clock
from vitrail.bench.largest import free_memory, largest_batch, out_of_memory
from vitrail.bench.machine import hardware, versions
from vitrail.bench.meter import Meter
from vitrail.bench.plan import OURS, BenchPlan, Measure, Task
from vitrail.bench.rows import DONE, PARTIAL, Ledger, Row
from vitrail.bench.seat import Seat, crowded, fits, room_on
from vitrail.bench.subjects import Case, Inputs, many_compilations
from vitrail.errors import VitrailError
from vitrail.models import ModelConfig, ViTConfig, model_config
from vitrail.train.parallel import choose_device
from vitrail.train.step import chosen_precision

Say = Callable[[str], None]


def run(plan: BenchPlan, *, say: Say = lambda _: None, command: str = "") -> list[Row]:
    """Measure what the plan names; `say` hears in sentences how it goes.

    With `plan.out` each row is in bench.csv as soon as it is known, and rows that an earlier run has finished there are taken
    from it. A subject that fails, or does not fit in memory, has a row that says so, and the others go on.
    """
    bench = Bench(plan, say, command)
    try:
        with many_compilations(), bench.meter:
            bench.measure()
    finally:
        bench.draw()
    return bench.asked()


class _Full(Exception):
    """There is no room for this subject beside the others."""


class Bench:
    """A benchmark in progress."""

    def __init__(self, plan: BenchPlan, say: Say, command: str) -> None:
        self.plan, self.say = plan, say
        self.device = choose_device(plan.device)
        if plan.largest_batch and self.device.type != "cuda":
            raise VitrailError(
                f"--largest-batch needs a GPU; this is {self.device.type}. Without one, memory that runs out ends the process. "
                "`vitrail plan` computes the largest micro-batch for GPUs that are not here."
            )
        self.precision = chosen_precision(plan.precision, self.device)
        self.clock, self.meter = Clock(self.device), Meter(self.device)
        self.configs = [_as_peers_compute(model_config(name, image_size=plan.image_size)) for name in plan.model]
        if plan.out is not None and plan.out.exists() and not plan.out.is_dir():
            raise VitrailError(f"{plan.out} is a file; --out is a folder for bench.csv and bench.png. Choose another name.")
        self.ledger = Ledger(plan.out / "bench.csv" if plan.out else None, fresh=plan.fresh)
        self.deadline = math.inf if plan.seconds is None else time.monotonic() + plan.seconds
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        self.origin: dict[str, Any] = {"hardware": hardware(self.device), **versions(), "date": now, "command": command}
        self._asked: list[tuple[Any, ...]] = []

    def measure(self) -> None:
        present = [peer for peer in self.plan.against if not self._is_missing(peer)]
        for config in self.configs:
            for task in self.plan.tasks:
                for measure in self.plan.measures:
                    self._contest(self._cases(config, task, measure, present))

    def asked(self) -> list[Row]:
        """The rows of this plan, whether measured now or by an earlier run."""
        known = {row.key: row for row in self.ledger.rows}
        return [known[key] for key in self._asked if key in known]

    def draw(self) -> None:
        if self.plan.out is None or not self.ledger.rows:
            return
        try:
            from vitrail.bench.drawing import draw
        except ModuleNotFoundError as error:
            self.say(f"bench.png is not drawn: {str(error.name).split('.')[0]} is not installed.")
            return
        draw(self.ledger.rows, self.plan.out / "bench.png")

    def _is_missing(self, peer: str) -> bool:
        sentence = peers.missing(peer)
        if sentence:
            self.say(sentence)
        return sentence is not None

    def _cases(self, config: ModelConfig, task: Task, measure: Measure, present: Sequence[str]) -> list[Case]:
        """What is to be measured of one model, without what is finished already."""
        if present and not peers.comparable(config):
            self.say(f"{config.name} is measured alone: the peers are compared on plain Vision Transformers.")
            present = ()
        gpu = self.device.type == "cuda"
        usual = self.plan.batch or (256 if gpu else 8)
        batch = {"latency": 1, "largest-batch": 0}.get(measure, usual)  # the largest one is not known yet
        clip = self.plan.clip if task == "train" else None
        found = [
            Case(config, task, measure, who, mode, batch, self.precision, self.device, clip)
            for who in (OURS, *present)
            for mode in self.plan.modes_of(who, task, measure, gpu=gpu)
        ]
        self._asked += [self._row(case, PARTIAL).key for case in found]
        finished = [case for case in found if self.ledger.finished(self._row(case, PARTIAL))]
        if finished:
            self.say(
                f"{config.name} {task}: {len(finished)} of {len(found)} rows are finished already; --fresh measures them again."
            )
        return [case for case in found if case not in finished]

    def _contest(self, cases: list[Case]) -> None:
        if not cases:
            return
        if cases[0].measure == "largest-batch":
            for case in cases:
                if not self._late(case):
                    self._search(case)
            return
        inputs = Inputs(cases[0].config, cases[0].batch, self.device)
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        top = ceiling(cases[0].config, cases[0].batch, dtype, self.clock)
        self.say(f"{cases[0].config.name} {cases[0].task}: the fastest matrix product gives {top / 1e12:,.3g} TFLOP/s.")
        waiting = list(cases)
        while waiting and not self._late(waiting[0]):
            seats = self._fill(waiting, inputs, top)
            self._turns(seats, top)
            seats.clear()
            free_memory(self.device)

    def _fill(self, waiting: list[Case], inputs: Inputs, top: float) -> list[Seat]:
        """Seat as many as there is room for, taking them off the list; each has its first turn at once, so that it has a row."""
        seats: list[Seat] = []
        while waiting and not (seats and self._late(waiting[0])):
            try:
                seat = self._seat(waiting[0], inputs, seats)
            except _Full:
                self.say(f"{waiting[0]}: does not fit beside the {len(seats)} before it, so it is measured after them.")
                break
            waiting.pop(0)
            if seat is not None and self._take_turn(seat, top):
                seats.append(seat)
                speed = seat.figures(top)["images_per_s"]
                self.say(f"{seat.case}: first step {seat.first_step:.1f} s, {speed:,.0f} images/s in the first round")
        for seat in seats:
            seat.others = len(seats) - 1
        return seats

    def _seat(self, case: Case, inputs: Inputs, others: list[Seat]) -> Seat | None:
        """A subject ready for its turns; None, and a row that says why, if it cannot be."""
        free_memory(self.device, compiled=False)
        try:
            seat = Seat(case, inputs, self.clock, self.meter, self.plan.steps)
        except Exception as error:  # whatever a subject dies of, the others shall be measured
            reason, full = _first_line(error), out_of_memory(error)
        else:
            if others and crowded([*others, seat], room_on(self.device)):
                raise _Full
            return seat
        free_memory(self.device, compiled=False)  # only now: until here the error's traceback held the subject's memory
        if full and others:
            raise _Full
        self._failed(case, reason, full=full)
        return None

    def _failed(self, case: Case, reason: str, *, full: bool) -> None:
        self.ledger.put(self._row(case, "out of memory" if full else "failed", note="" if full else reason))
        self.say(f"{case}: out of memory at batch {case.batch}" if full else f"{case} failed: {reason}")

    def _turns(self, seats: list[Seat], top: float) -> None:
        for _ in range(self.plan.rounds - 1):
            for seat in list(seats):
                if time.monotonic() > self.deadline:
                    return
                if not self._take_turn(seat, top):
                    seats.remove(seat)

    def _take_turn(self, seat: Seat, top: float) -> bool:
        """Whether it went well; the row is kept either way."""
        try:
            seat.take_turn()
        except Exception as error:
            self._failed(seat.case, _first_line(error), full=out_of_memory(error))
            return False
        status = DONE if len(seat.turns) >= self.plan.rounds else PARTIAL
        self.ledger.put(self._row(seat.case, status, **seat.figures(top)))
        return True

    def _search(self, case: Case) -> None:
        trouble: list[str] = []

        def try_batch(batch: int) -> bool:
            reason = self._fits(dataclasses.replace(case, batch=batch))
            trouble.extend([reason] if reason else [])
            return reason is None

        found = largest_batch(try_batch)
        note = trouble[-1] if trouble else ""
        status = DONE if found else ("failed" if note else "out of memory")
        self.ledger.put(self._row(case, status, largest_batch=found or None, note=note))
        self.say(f"{case}: the largest batch is {found}" if found else f"{case}: not even one image fits. {note}")

    def _fits(self, case: Case) -> str | None:
        """None if two steps fit in memory; an empty word if they do not; what went wrong if it was something else."""
        reason = None
        try:
            fits(case, self.clock)
        except Exception as error:
            reason = "" if out_of_memory(error) else f"at batch {case.batch}: {_first_line(error)}"
        free_memory(self.device)
        return reason

    def _late(self, case: Case) -> bool:
        late = time.monotonic() > self.deadline
        if late:
            self.say(f"The time is up before {case}. The same command goes on from here.")
        return late

    def _row(self, case: Case, status: str, **found: Any) -> Row:
        height, width = case.config.image_size
        return Row(
            model=case.config.name,
            task=case.task,
            measure=case.measure,
            who=case.who,
            mode=case.mode,
            batch=case.batch,
            image_size=f"{height}x{width}",
            precision=case.precision,
            clip=case.clip,
            status=status,
            **found,
            **self.origin,
        )


def _as_peers_compute(config: ModelConfig) -> ModelConfig:
    """With the peers' form of GELU, so that all compute the same function; ours is the paper's code's."""
    return config.replace(gelu="erf") if isinstance(config, ViTConfig) else config


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if isinstance(error, VitrailError) and lines else f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
