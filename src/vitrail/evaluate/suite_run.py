"""Run a suite: fine-tune and test on every task whose data is available, and average by group as in the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitrail.errors import StoppedBySignal, VitrailError
from vitrail.evaluate.settings import SuiteSettings
from vitrail.evaluate.suite_layouts import MissingData
from vitrail.evaluate.suite_sources import TaskData, open_task
from vitrail.evaluate.suites import GROUPS, SuiteTask
from vitrail.files import atomic_file, write_text
from vitrail.recipes import recipe_named
from vitrail.text import to_csv, to_json
from vitrail.train.callbacks import Callback
from vitrail.train.config import Recipe
from vitrail.train.loop import train
from vitrail.train.prepare import Prepared, make_model, make_task
from vitrail.wilson import wilson

_VTAB_CROP = (384 / 448) ** 2
"""Area of VTAB's random crops: 384×384 pixels of an image resized to 448×448 (BiT, which the paper follows)."""


@dataclass(frozen=True)
class TaskScore:
    task: str
    title: str
    group: str | None
    accuracy: float
    interval: tuple[float, float]
    train_images: int
    test_images: int
    official: bool
    origin: str
    runs: int = 1
    """`accuracy` is the mean over so many runs with different seeds."""
    std: float | None = None
    """Standard deviation over the runs; None for one run."""


@dataclass(frozen=True)
class SuiteResult:
    scores: tuple[TaskScore, ...]
    missing: dict[str, str]
    """Tasks without data, each with a message on how to get it."""
    total: int

    def means(self) -> dict[str, tuple[float, int]]:
        """Return mean accuracy and number of tasks per group and over all tasks, of the tasks that were run."""
        means: dict[str, tuple[float, int]] = {}
        for group in GROUPS:
            values = [one.accuracy for one in self.scores if one.group == group]
            if values:
                means[group] = sum(values) / len(values), len(values)
        if self.scores:
            means["all"] = sum(one.accuracy for one in self.scores) / len(self.scores), len(self.scores)
        return means

    def to_dict(self) -> dict[str, Any]:
        return {
            "scores": [dataclasses.asdict(one) for one in self.scores],
            "means": {name: {"accuracy": mean, "tasks": count} for name, (mean, count) in self.means().items()},
            "missing": self.missing,
            "complete": len(self.scores) == self.total,
        }


def find_tasks(tasks: Sequence[SuiteTask], root: Path, sources: Mapping[str, str]) -> tuple[dict[str, TaskData], dict[str, str]]:
    """Open the data of all tasks. Returns what is available, and for each other task a message on how to get it."""
    unknown = sorted(set(sources) - {task.name for task in tasks})
    if unknown:
        raise VitrailError(f"--source: {unknown[0]!r} is not a task. The tasks are {', '.join(task.name for task in tasks)}.")
    available, missing = dict[str, TaskData](), dict[str, str]()
    for task in tasks:
        try:
            available[task.name] = open_task(task, root, sources)
        except MissingData as error:
            missing[task.name] = str(error)
    return available, missing


def recipe_for(task: SuiteTask, checkpoint: str, settings: SuiteSettings, origin: str) -> Recipe:
    """Build the paper's fine-tuning recipe with the task's crop and flip rules."""
    recipe = recipe_named(task.recipe)
    augment = dataclasses.replace(recipe.augment, flip=0.5 if task.flip else 0.0)
    if not task.crop:
        augment = dataclasses.replace(augment, crop="none")
    elif task.group is not None:
        augment = dataclasses.replace(augment, crop="same-aspect", crop_area=(_VTAB_CROP, _VTAB_CROP))
    schedule = recipe.schedule if settings.warmup is None else dataclasses.replace(recipe.schedule, warmup=settings.warmup)
    optim = recipe.optim if settings.lr is None else dataclasses.replace(recipe.optim, lr=settings.lr)
    size = recipe.model.image_size if settings.image_size is None else settings.image_size
    return recipe.replace(
        name=f"{recipe.name}-{task.name}",
        model=dataclasses.replace(recipe.model, start=checkpoint, image_size=size),
        data=dataclasses.replace(
            recipe.data,
            source=origin,
            workers=settings.workers,
            preprocess=settings.preprocess or recipe.data.preprocess,
            exif=False,  # TensorFlow Datasets, from which the paper read these images, ignores it
        ),
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
) -> TaskScore:
    """Fine-tune on the task's training images and evaluate on its test images. A finished run is not run again.

    Its interval is about the test images; how much the runs differ is `std`.
    """
    if settings.seeds < 1:
        raise VitrailError(f"seeds is {settings.seeds}; use 1 or more.")
    hits = []
    for number in range(settings.seeds):
        seed, folder = settings.seed + number, f"{task.name}-run{number + 1}" if number else task.name
        hits.append(_run_once(task, data, checkpoint, out / folder, dataclasses.replace(settings, seed=seed), callbacks))
    images = len(data.test)
    accuracies = [one / images for one in hits]
    return TaskScore(
        task.name,
        task.title,
        task.group,
        mean(accuracies),
        wilson(mean(hits), images),
        len(data.train),
        images,
        data.official,
        data.origin,
        len(hits),
        stdev(accuracies) if len(hits) > 1 else None,
    )


def _run_once(
    task: SuiteTask, data: TaskData, checkpoint: str, out: Path, settings: SuiteSettings, callbacks: Sequence[Callback]
) -> int:
    """Return the number of test images classified correctly."""
    recipe = recipe_for(task, checkpoint, settings, data.origin)
    notes: list[str] = []
    objective = make_task(recipe, data.train)
    model, preprocess = make_model(recipe, objective.outputs, data.train.classes, notes)
    prepared = Prepared(model, objective, preprocess, data.train, data.test, data.train.classes, data.origin, notes)
    result = train(recipe, out, callbacks=callbacks, prepared=prepared)
    if result.ended_by is not None:
        text = f"{task.title} was interrupted at step {result.steps}. Run the same command again to resume."
        raise StoppedBySignal(text, result.ended_by)
    images = int(result.metrics["images"])
    hits = round(result.metrics["accuracy"] * images)
    if images != len(data.test):
        raise VitrailError(
            f"{task.title}: only {images:,} of {len(data.test):,} test images were evaluated, so the score is not valid. "
            "`vitrail data check` lists images that cannot be read."
        )
    return hits


def write_results(out: Path, result: SuiteResult, about: dict[str, Any]) -> None:
    """Write scores.csv and results.json."""
    names = [field.name for field in dataclasses.fields(TaskScore) if field.name != "interval"]
    with atomic_file(out / "scores.csv") as temporary:
        temporary.write_bytes(to_csv([names, *([getattr(one, name) for name in names] for one in result.scores)]))
    write_text(out / "results.json", to_json({**about, **result.to_dict()}, indent=2) + "\n")
