"""Run a benchmark: build and warm up entries, time them in alternating rounds, and write rows as they are measured."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vitrail.bench import baselines
from vitrail.bench.entry import Entry, available_memory, check_fits, exceeds_memory
from vitrail.bench.largest_batch import free_memory, is_out_of_memory, largest_batch
from vitrail.bench.machine import hardware, versions
from vitrail.bench.peak import measure_peak_flops
from vitrail.bench.plan import OURS, BenchPlan, Metric, Task
from vitrail.bench.power import PowerMonitor
from vitrail.bench.results import DONE, PARTIAL, ResultsFile, Row
from vitrail.bench.timer import Timer
from vitrail.bench.workload import Case, Inputs, many_compilations
from vitrail.errors import VitrailError
from vitrail.models import ModelConfig, ViTConfig, model_config
from vitrail.train.parallel import choose_device
from vitrail.train.precision import chosen_precision

Log = Callable[[str], None]


def run(plan: BenchPlan, *, log: Log = lambda _: None, command: str = "") -> list[Row]:
    """Run a benchmark and return its rows; progress messages go to `log`.

    With `plan.out` each row is written to bench.csv as soon as it is measured, and rows that an earlier run finished there are
    reused. An entry that fails or runs out of memory gets a row with that status; the others continue.
    """
    benchmark = Benchmark(plan, log, command)
    try:
        with many_compilations(), benchmark.power:
            benchmark.measure()
    finally:
        benchmark.plot()
    return benchmark.rows()


class _DoesNotFit(Exception):
    """Not enough memory for this entry next to the others."""


class Benchmark:
    """A benchmark in progress."""

    def __init__(self, plan: BenchPlan, log: Log, command: str) -> None:
        self.plan, self.log = plan, log
        self.device = choose_device(plan.device)
        if plan.largest_batch and self.device.type != "cuda":
            raise VitrailError(
                f"--largest-batch needs a GPU, but the device is {self.device.type}, where running out of memory ends the process. "
                "`vitrail plan` computes the largest micro-batch for a GPU you do not have."
            )
        self.precision = chosen_precision(plan.precision, self.device)
        self.timer, self.power = Timer(self.device), PowerMonitor(self.device)
        self.configs = [_with_erf_gelu(model_config(name, image_size=plan.image_size)) for name in plan.model]
        if plan.out is not None and plan.out.exists() and not plan.out.is_dir():
            raise VitrailError(f"{plan.out} is a file; --out must be a folder, for bench.csv and bench.png. Choose another name.")
        self.results = ResultsFile(plan.out / "bench.csv" if plan.out else None, overwrite=plan.overwrite)
        self.deadline = math.inf if plan.seconds is None else time.monotonic() + plan.seconds
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        self.environment: dict[str, Any] = {"hardware": hardware(self.device), **versions(), "date": now, "command": command}
        self._planned: list[tuple[Any, ...]] = []  # keys of this plan's rows

    def measure(self) -> None:
        installed = [library for library in self.plan.against if not self._is_missing(library)]
        for config in self.configs:
            for task in self.plan.tasks:
                for metric in self.plan.metrics:
                    self._compare(self._cases(config, task, metric, installed))

    def rows(self) -> list[Row]:
        """Return the rows of this plan, whether measured now or by an earlier run."""
        known = {row.key: row for row in self.results.rows}
        return [known[key] for key in self._planned if key in known]

    def plot(self) -> None:
        if self.plan.out is None or not self.results.rows:
            return
        try:
            from vitrail.bench.plot import plot
        except ModuleNotFoundError as error:
            self.log(f"bench.png is not plotted: {str(error.name).split('.')[0]} is not installed.")
            return
        plot(self.results.rows, self.plan.out / "bench.png")

    def _is_missing(self, library: str) -> bool:
        message = baselines.missing(library)
        if message:
            self.log(message)
        return message is not None

    def _cases(self, config: ModelConfig, task: Task, metric: Metric, libraries: Sequence[str]) -> list[Case]:
        """Return what to measure for one model, without the rows that are already finished."""
        if libraries and not baselines.comparable(config):
            self.log(f"{config.name} is measured alone: only plain Vision Transformers are compared with other libraries.")
            libraries = ()
        gpu = self.device.type == "cuda"
        default_batch = self.plan.batch or (256 if gpu else 8)
        batch = {"latency": 1, "largest-batch": 0}.get(metric, default_batch)  # 0: the largest batch is not known yet
        clip = self.plan.clip if task == "train" else None
        cases = [
            Case(config, task, metric, library, mode, batch, self.precision, self.device, clip)
            for library in (OURS, *libraries)
            for mode in self.plan.modes_of(library, task, metric, gpu=gpu)
        ]
        self._planned += [self._row(case, PARTIAL).key for case in cases]
        finished = [case for case in cases if self.results.finished(self._row(case, PARTIAL))]
        if finished:
            self.log(
                f"{config.name} {task}: {len(finished)} of {len(cases)} rows are already finished; --overwrite measures them again."
            )
        return [case for case in cases if case not in finished]

    def _compare(self, cases: list[Case]) -> None:
        if not cases:
            return
        if cases[0].metric == "largest-batch":
            for case in cases:
                if not self._out_of_time(case):
                    self._search(case)
            return
        inputs = Inputs(cases[0].config, cases[0].batch, self.device)
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        peak = measure_peak_flops(cases[0].config, cases[0].batch, dtype, self.timer)
        self.log(f"{cases[0].config.name} {cases[0].task}: matmul peak {peak / 1e12:,.3g} TFLOP/s")
        pending = list(cases)
        while pending and not self._out_of_time(pending[0]):
            entries = self._build_entries(pending, inputs, peak)
            self._run_rounds(entries, peak)
            entries.clear()
            free_memory(self.device)

    def _build_entries(self, pending: list[Case], inputs: Inputs, peak: float) -> list[Entry]:
        """Build as many entries as fit in memory and remove them from `pending`; run each one's first round at once."""
        entries: list[Entry] = []
        while pending and not (entries and self._out_of_time(pending[0])):
            try:
                entry = self._build_entry(pending[0], inputs, entries)
            except _DoesNotFit:
                self.log(f"{pending[0]}: does not fit in memory next to the other {len(entries)}; it is measured after them.")
                break
            pending.pop(0)
            if entry is not None and self._run_round(entry, peak):
                entries.append(entry)
                speed = entry.results(peak)["images_per_s"]
                self.log(f"{entry.case}: first step {entry.first_step:.1f} s, {speed:,.0f} images/s in the first round")
        for entry in entries:
            entry.interleaved_with = len(entries) - 1
        return entries

    def _build_entry(self, case: Case, inputs: Inputs, others: list[Entry]) -> Entry | None:
        """Return a warmed-up entry; if it fails, write a row with the reason and return None."""
        free_memory(self.device, compiled=False)
        try:
            entry = Entry(case, inputs, self.timer, self.power, self.plan.steps)
        except Exception as error:  # any failure of one entry must not stop the others
            reason, oom = _first_line(error), is_out_of_memory(error)
        else:
            if others and exceeds_memory([*others, entry], available_memory(self.device)):
                raise _DoesNotFit
            return entry
        free_memory(self.device, compiled=False)  # only here: until now the error's traceback held the model's memory
        if oom and others:
            raise _DoesNotFit
        self._failed(case, reason, oom=oom)
        return None

    def _failed(self, case: Case, reason: str, *, oom: bool) -> None:
        self.results.put(self._row(case, "out of memory" if oom else "failed", note="" if oom else reason))
        self.log(f"{case}: out of memory at batch {case.batch}" if oom else f"{case} failed: {reason}")

    def _run_rounds(self, entries: list[Entry], peak: float) -> None:
        for _ in range(self.plan.rounds - 1):
            for entry in list(entries):
                if time.monotonic() > self.deadline:
                    return
                if not self._run_round(entry, peak):
                    entries.remove(entry)

    def _run_round(self, entry: Entry, peak: float) -> bool:
        """Run one round and write the row; return whether it succeeded."""
        try:
            entry.run_round()
        except Exception as error:
            self._failed(entry.case, _first_line(error), oom=is_out_of_memory(error))
            return False
        status = DONE if len(entry.rounds) >= self.plan.rounds else PARTIAL
        self.results.put(self._row(entry.case, status, **entry.results(peak)))
        return True

    def _search(self, case: Case) -> None:
        errors: list[str] = []

        def try_batch(batch: int) -> bool:
            reason = self._fits(dataclasses.replace(case, batch=batch))
            errors.extend([reason] if reason else [])
            return reason is None

        found = largest_batch(try_batch)
        note = errors[-1] if errors else ""
        status = DONE if found else ("failed" if note else "out of memory")
        self.results.put(self._row(case, status, largest_batch=found or None, note=note))
        self.log(f"{case}: the largest batch is {found}" if found else f"{case}: not even one image fits. {note}")

    def _fits(self, case: Case) -> str | None:
        """Return None if this batch fits, "" if memory runs out, or the message of any other error."""
        reason = None
        try:
            check_fits(case, self.timer)
        except Exception as error:
            reason = "" if is_out_of_memory(error) else f"at batch {case.batch}: {_first_line(error)}"
        free_memory(self.device)
        return reason

    def _out_of_time(self, case: Case) -> bool:
        late = time.monotonic() > self.deadline
        if late:
            self.log(f"Time limit reached before {case}. Run again to resume.")
        return late

    def _row(self, case: Case, status: str, **found: Any) -> Row:
        height, width = case.config.image_size
        return Row(
            model=case.config.name,
            task=case.task,
            metric=case.metric,
            library=case.library,
            mode=case.mode,
            batch=case.batch,
            image_size=f"{height}x{width}",
            precision=case.precision,
            clip=case.clip,
            status=status,
            **found,
            **self.environment,
        )


def _with_erf_gelu(config: ModelConfig) -> ModelConfig:
    """Use the erf form of GELU, as the other libraries do; our default is the tanh form of the paper's code."""
    return config.replace(gelu="erf") if isinstance(config, ViTConfig) else config


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if isinstance(error, VitrailError) and lines else f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
