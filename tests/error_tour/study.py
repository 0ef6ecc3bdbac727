"""Errors of studies: settings, plans, budgets, result files, processes."""

from __future__ import annotations

import dataclasses
import signal
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.error_tour.case import Case, at
from tests.error_tour.files import scratch
from vitrail.data import Source, open_source
from vitrail.study.claims import results, write_results
from vitrail.study.definition import changed
from vitrail.study.definitions import STUDIES
from vitrail.study.jobs import Processes, pool
from vitrail.study.plan import Plan, fitted, full_plan, stored_plan
from vitrail.study.rows import Row, read_rows
from vitrail.study.run import Interrupted
from vitrail.study.session import run_study
from vitrail.study.settings import StudySettings
from vitrail.study.speeds import Sample, Speeds
from vitrail.train.config import Recipe
from vitrail.train.parallel import World


@cache
def plan() -> Plan:
    return full_plan(STUDIES["positions"], StudySettings(device="cpu", budget=2.0))


def written(name: str, text: str) -> Path:
    file = scratch() / name
    file.write_text(text)
    return file


def numbers() -> object:
    rows = "".join(f"../photos/train/cat/{number}.jpg,{number}.5\n" for number in range(4))
    table = written("numbers.csv", f"path,age\n{rows}")
    return full_plan(STUDIES["positions"], StudySettings(target=f"csv:{table}?targets=age", device="cpu"))


def without_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every source have an empty training split, as a dataset of the Hub can."""
    train = open_source("digits").split("train")
    empty = Source(reference="hf:empty", kind="hf", splits={"train": train.subset(np.arange(0))})
    monkeypatch.setattr("vitrail.study.plan.open_source", lambda reference: empty)


def other_budget() -> object:
    file = scratch() / "plan.json"
    plan().save(file)
    return stored_plan(file, plan().study, dataclasses.replace(plan().settings, budget=5.0))


def too_slow() -> object:
    speeds = Speeds()
    speeds.add(plan().rows()[0], Sample(1e-9, None, 60.0))
    return fitted(plan(), speeds, 90, jobs=1)


def killed() -> object:
    """A process of the pool that ended, as one that the system killed for its memory."""
    processes = Processes(1, "cpu", World(torch.device("cpu")))
    ours, theirs = Pipe()
    theirs.close()
    processes._workers[ours] = SimpleNamespace(join=lambda timeout: None, exitcode=-9)
    return processes._answer(ours)


def bad_row(*cells: str) -> object:
    names = [field.name for field in dataclasses.fields(Row)]
    return read_rows(written("compute.csv", f"{','.join(names)}\n{','.join(cells)}\n"))


def stop_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: Any) -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("vitrail.study.session.pool", stopped)


CASES: tuple[Case, ...] = (
    at("study/settings.py:StudySettings.__post_init__#1", "vitrail study positions --seeds 0", "--seeds is 0;",
       "it must be at least 1."),
    at("study/settings.py:StudySettings.__post_init__#2", "vitrail study positions --finetune-epochs 0", "--finetune-epochs is 0;",
       "it must be more than 0."),
    at("study/definition.py:changed", lambda: changed(Recipe(), {"optim.lrr": 1}), "There is no setting optim.lrr.",
       "Did you mean optim.lr?"),
    at("study/ladders.py:ladder_for", "vitrail study positions --image-size 30 --ladder paper",
       "--image-size 30 is not a multiple of 32, the largest patch of the paper models.", "Use 32."),
    at("study/plan.py:full_plan#1", lambda: full_plan(STUDIES["positions"], StudySettings(data="hf:empty", device="cpu")),
       "The training split of hf:empty has no images.", "Choose another source.", patch=without_images),
    at("study/plan.py:full_plan#2", numbers, "has regress targets;", "studies transfer to one class per image.",
       "Choose another --target."),
    at("study/plan.py:stored_plan#1", lambda: stored_plan(written("plan.json", "{}"), plan().study, plan().settings),
       "plan.json is not the plan of a study (it has no 'settings').", "Choose another --out, or remove it."),
    at("study/plan.py:stored_plan#2", other_budget, "holds this study with other settings: budget 2.0 → 5.0.",
       "To resume it, use its settings; for a new one, choose another --out."),
    at("study/plan.py:_kept", too_slow, "takes about", "of the budget of 2 minutes 1.5 are left after measuring the speed.",
       "Use --budget"),
    at("study/rows.py:read_rows#1", lambda: bad_row("compute", "first"), "compute.csv has the cell 'first', which no study writes.",
       "Correct it, or move the file away."),
    at("study/rows.py:read_rows#1", lambda: bad_row(*["1"] * 99), "compute.csv has a row with too many cells",
       "Correct it, or move the file away."),
    at("study/rows.py:read_rows#2", lambda: read_rows(written("compute.csv", "a,b\n1,2\n")),
       "compute.csv does not have the columns of a study.", "Choose another --out, or move the file away."),
    at("study/claims.py:write_results", lambda: write_results(written("RESULTS.md", "# Results\n"), []),
       "lacks the lines <!-- begin: vitrail study results --> and <!-- end: vitrail study results -->", "Add them."),
    at("study/claims.py:results", lambda: results([Path("empty")], Path()), "empty has no results of a study.",
       "Name folders that hold CSV files of studies."),
    at("study/jobs.py:Processes._answer", killed, "A process of the study ended with status -9;",
       "perhaps the memory was too small for 2 at once.", "Run the same command again to resume, with fewer --jobs."),
    at("study/jobs.py:pool", lambda: pool(2, "cpu").__enter__(),
       "--jobs is 2, but under torchrun all devices train one row together;", "use --jobs 1.",
       patch=lambda monkeypatch: monkeypatch.setenv("RANK", "0")),
    at("study/session.py:run_study", lambda: run_study("positions", StudySettings(out=scratch(), device="cpu")),
       "The study positions was interrupted;", "run the same command again to resume.", patch=stop_the_pool),
)  # fmt: skip
