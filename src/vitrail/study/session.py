"""Run a study from beginning to end: measure, plan, train, draw."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import StoppedBySignal
from vitrail.study.definitions import study_named
from vitrail.study.jobs import Pool, pool
from vitrail.study.plan import MEASURING, Plan, describe, fitted, full_plan, late_rows, left_out_rows, probes, stored_plan
from vitrail.study.report import write_outputs
from vitrail.study.rows import FAILED, LEFT_OUT, Results, lock
from vitrail.study.run import Interrupted, Job, Say, late_text, measure, run_remaining, to_stderr
from vitrail.study.settings import StudySettings
from vitrail.study.speeds import Speeds
from vitrail.train.parallel import World, choose_device


@dataclass(frozen=True)
class StudyResult:
    """What a study left behind."""

    csv: Path
    files: tuple[Path, ...]
    """Figure, table and report."""
    seconds: float
    late: int
    """Rows that were not started because the budget was over."""


def run_study(name: str, settings: StudySettings, *, say: Say = to_stderr) -> StudyResult:
    """Run what is missing of a study, and draw it. Run it again to resume; what is finished is not run again."""
    began = time.time()
    study = study_named(name)
    whole = full_plan(study, settings)
    jobs = _jobs(whole)
    results = Results(settings.out / f"{name}.csv")
    folder = settings.out / name
    stored = stored_plan(folder / "plan.json", study, settings)
    if stored is not None and not settings.retry_failed and {row.key for row in stored.rows()} <= results.finished():
        if os.environ.get("RANK", "0") != "0":
            return StudyResult(results.file, (), time.time() - began, 0)
        say(f"all {len(stored.rows())} rows of {name} are finished")
        return StudyResult(results.file, tuple(write_outputs(settings.out, [name])), time.time() - began, 0)
    try:
        with pool(jobs, settings.device) as (workers, world):
            say = say if world.main else _silent
            plan = _planned(whole, results, folder, workers, world, jobs, began, say)
            deadline = None if settings.budget is None else time.time() + _left(settings.budget, began)
            job = Job(plan, folder, results, jobs, deadline)
            if world.main:
                results.remove(LEFT_OUT)
                if settings.retry_failed:
                    results.remove(FAILED)
                results.put(left_out_rows(plan))
            world.barrier()
            late = max(workers.map(run_remaining_here, [(job, say is _silent)] * jobs), default=0)
            main = world.main
            if main and late:
                results.put(late_rows(plan, results.finished()))
    except Interrupted as error:
        raise StoppedBySignal(f"The study {name} was interrupted; run the same command again to resume.", *error.args) from error
    if late:
        say(late_text(late))
    files = write_outputs(settings.out, [name]) if main else ()
    return StudyResult(results.file, tuple(files), time.time() - began, late)


def _silent(text: str) -> None:
    """Ranks other than the main one print nothing."""


def run_remaining_here(job: Job, silent: bool, world: World) -> int:
    """Do so in one process of the pool."""
    return run_remaining(job, world, _silent if silent else to_stderr)


def _jobs(plan: Plan) -> int:
    """Return the number of processes: as asked, otherwise one per core where each row needs only one."""
    if "RANK" in os.environ:
        return plan.settings.jobs or 1
    if plan.settings.jobs is not None:
        return min(plan.settings.jobs, max(1, len(plan.rows())))
    if plan.ladder.name != "tiny" or choose_device(plan.settings.device).type != "cpu":
        return 1
    from vitrail.data.data_wait import max_workers

    return min(max_workers(), len(plan.rows()))


def _planned(whole: Plan, results: Results, folder: Path, workers: Pool, world: World, jobs: int, began: float, say: Say) -> Plan:
    """Return the stored plan, or measure the speed and make one. Only one process makes it; others wait for it."""
    settings, file = whole.settings, folder / "plan.json"
    if world.ranks > 1:
        plan = stored_plan(file, whole.study, settings)
        world.barrier()  # all have looked before one writes
        plan = plan or _measured(whole, results, folder, workers, jobs, began, say)
        if world.main:
            plan.save(file)
        world.barrier()
    else:
        with lock(folder / "plan.lock"):
            plan = stored_plan(file, whole.study, settings)
            if plan is None:
                plan = _measured(whole, results, folder, workers, jobs, began, say)
                plan.save(file)
    for line in describe(plan, jobs):
        say(line)
    return plan


def _measured(whole: Plan, results: Results, folder: Path, workers: Pool, jobs: int, began: float, say: Say) -> Plan:
    rows = probes(whole)
    # All processes measure at the same time, so that what they cost each other is part of the result.
    rows = (rows * jobs)[: max(len(rows), jobs)] if len(rows) < jobs else rows
    say(f"measuring the speed with {len(rows)} short runs")
    job = Job(whole, folder, results, jobs)
    speeds = Speeds()
    for row, sample in zip(rows, workers.map(measure, [(row, job) for row in rows]), strict=True):
        speeds.add(row, sample)
    budget, used = whole.settings.budget, time.time() - began
    if budget is not None and used / 60 - MEASURING * budget >= 0.05:  # the two numbers differ as they are shown
        counted = f"{MEASURING * budget:.1f} of them count, {100 * MEASURING:.0f} % of the budget"
        say(f"measuring took {used / 60:.1f} minutes; {counted}, so the study ends later than the budget says")
    return fitted(whole, speeds, None if budget is None else _left(budget, began), jobs)


def _left(budget: float, began: float) -> float:
    """Return the seconds that are left of a budget in minutes, of which measuring the speed may use a part only."""
    return 60 * budget - min(time.time() - began, 60 * MEASURING * budget)
