"""Running a suite: fine-tune on every task that is there, measure, average by group as the paper does."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError
from vitrail.evaluate.intervals import wilson
from vitrail.evaluate.suite_sources import Missing, TaskData, open_task
from vitrail.evaluate.suites import GROUPS, SuiteTask
from vitrail.files import write_text
from vitrail.recipes import recipe_named
from vitrail.train.callbacks import Callback
from vitrail.train.config import Recipe
from vitrail.train.loop import train
from vitrail.train.prepare import Prepared, make_model, make_task


@dataclass(frozen=True, kw_only=True)
class SuiteSettings:
    """What may differ from the paper's protocol. Whatever is None stays as the recipe has it."""

    steps: int | None = None
    """Optimiser steps; the paper's VTAB protocol has 2,500."""
    warmup: int | None = None
    lr: float | None = None
    batch: int | None = None
    size: int | None = None
    """Side of the input in pixels; the paper's is 384."""
    seed: int = 0
    device: str = "auto"
    workers: int | None = None


@dataclass(frozen=True)
class Score:
    task: str
    title: str
    group: str | None
    accuracy: float
    interval: tuple[float, float]
    train_images: int
    test_images: int
    official: bool
    origin: str


@dataclass(frozen=True)
class SuiteResult:
    scores: tuple[Score, ...]
    missing: dict[str, str]
    """Tasks that were not there, each with what to do about it."""
    total: int

    def means(self) -> dict[str, tuple[float, int]]:
        """Mean accuracy and number of tasks by group, and over all of them; only what was run is in it."""
        found: dict[str, tuple[float, int]] = {}
        for group in GROUPS:
            values = [one.accuracy for one in self.scores if one.group == group]
            if values:
                found[group] = sum(values) / len(values), len(values)
        if self.scores:
            found["all"] = sum(one.accuracy for one in self.scores) / len(self.scores), len(self.scores)
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "scores": [dataclasses.asdict(one) for one in self.scores],
            "means": {name: {"accuracy": mean, "tasks": count} for name, (mean, count) in self.means().items()},
            "missing": self.missing,
            "complete": len(self.scores) == self.total,
        }


def find_tasks(tasks: Sequence[SuiteTask], root: Path, given: Mapping[str, str]) -> tuple[dict[str, TaskData], dict[str, str]]:
    """The data of those tasks that are there, and for the others a sentence on how to get them."""
    unknown = sorted(set(given) - {task.name for task in tasks})
    if unknown:
        raise VitrailError(
            f"--source names {unknown[0]!r}, which is not among the tasks: {', '.join(task.name for task in tasks)}."
        )
    there, missing = dict[str, TaskData](), dict[str, str]()
    for task in tasks:
        try:
            there[task.name] = open_task(task, root, given)
        except Missing as error:
            missing[task.name] = str(error)
    return there, missing


def recipe_for(task: SuiteTask, checkpoint: str, settings: SuiteSettings, origin: str) -> Recipe:
    """The paper's fine-tuning, with the task's own crop and flip rules."""
    recipe = recipe_named(task.recipe)
    augment = dataclasses.replace(recipe.augment, crop=recipe.augment.crop if task.crop else "none", flip=0.5 if task.flip else 0.0)
    schedule = recipe.schedule if settings.warmup is None else dataclasses.replace(recipe.schedule, warmup=settings.warmup)
    optim = recipe.optim if settings.lr is None else dataclasses.replace(recipe.optim, lr=settings.lr)
    size = recipe.model.image_size if settings.size is None else settings.size
    return recipe.replace(
        name=f"{recipe.name}-{task.name}",
        model=dataclasses.replace(recipe.model, start=checkpoint, image_size=size),
        data=dataclasses.replace(recipe.data, source=origin, workers=settings.workers),
        augment=augment,
        optim=optim,
        schedule=schedule,
        steps=settings.steps or recipe.steps,
        batch=settings.batch or recipe.batch,
        seed=settings.seed,
        device=settings.device,
        eval_every=0,
    )


def run_task(
    task: SuiteTask, data: TaskData, checkpoint: str, out: Path, settings: SuiteSettings, callbacks: Sequence[Callback] = ()
) -> Score:
    """Fine-tune on the task's training images and measure on its test images. A task that is finished is not run again."""
    recipe = recipe_for(task, checkpoint, settings, data.origin)
    notes: list[str] = []
    goal = make_task(recipe, data.train)
    model, preprocess = make_model(recipe, goal.outputs, data.train.classes, notes)
    prepared = Prepared(model, goal, preprocess, data.train, data.test, data.train.classes, data.origin, notes)
    result = train(recipe, out / task.name, callbacks=callbacks, prepared=prepared)
    if result.ended_by is not None:
        raise VitrailError(f"{task.title} was interrupted at step {result.steps}; the same command goes on from there.")
    images = int(result.metrics["images"])
    right = round(result.metrics["accuracy"] * images)
    if images != len(data.test):
        raise VitrailError(f"{task.title}: {images} of {len(data.test)} test images were measured, so the score would not count.")
    return Score(
        task.name,
        task.title,
        task.group,
        right / images,
        wilson(right, images),
        len(data.train),
        images,
        data.official,
        data.origin,
    )


def write_results(out: Path, result: SuiteResult, about: dict[str, Any]) -> None:
    """scores.csv for people and plots, results.json for programs."""
    buffer = io.StringIO()
    rows = csv.writer(buffer, lineterminator="\n")
    names = [field.name for field in dataclasses.fields(Score) if field.name != "interval"]
    rows.writerow(names)
    rows.writerows([[getattr(one, name) for name in names] for one in result.scores])
    write_text(out / "scores.csv", buffer.getvalue())
    write_text(out / "results.json", json.dumps({**about, **result.to_dict()}, indent=2) + "\n")
