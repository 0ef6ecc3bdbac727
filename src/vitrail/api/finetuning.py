"""Fine-tune a checkpoint: which recipe, with which changes, and the run itself. `vitrail finetune` calls the same functions."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vitrail import checkpoints
from vitrail.api.image_check import HowMany, image_check
from vitrail.api.progress import progress_bar
from vitrail.api.run import Run
from vitrail.api.run_report import write_run_report
from vitrail.api.training_progress import training_progress
from vitrail.api.wording import for_finetune, python_errors
from vitrail.checkpoints.references import is_name
from vitrail.checkpoints.url import is_url
from vitrail.data import open_source
from vitrail.errors import VitrailError, did_you_mean
from vitrail.recipes import recipe_named
from vitrail.recipes.any_folder import any_folder
from vitrail.train.callbacks import Callback
from vitrail.train.config import Recipe
from vitrail.train.loop import MakeEvaluator
from vitrail.train.plain import flatten
from vitrail.train.sweep import sweep_and_train

log = logging.getLogger("vitrail.train")


@partial(python_errors, wording=for_finetune)
def finetune(
    ref: str | os.PathLike[str] | checkpoints.Bundle,
    data: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    recipe: str | Recipe | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    lora: int | None = None,
    seed: int | None = None,
    sweep: bool = False,
    check_images: HowMany = "auto",
    allow_change: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    evaluators: Sequence[MakeEvaluator] = (),
    report: bool = True,
    progress: bool | None = None,
    **changes: Any,
) -> Run:
    """Fine-tune a checkpoint on your own images, as the paper does: a new zero-initialised head, SGD with momentum, cosine.

    Call it again with the same `out` and settings to resume the run; a finished one is returned at once.

    Args:
        ref: The checkpoint to start from: a name such as "ViT-B/16", a run, a folder, a file, "hf:owner/name".
        data: The images: a folder with one folder per class, a CSV, "torchvision:CIFAR10"; default: those of the recipe.
        out: The run folder; default: runs/NAME.
        recipe: A recipe, or its name, instead of the defaults, which depend on the number of images.
        epochs: Length of the run in epochs; replaces the recipe's length.
        steps: Length of the run in optimiser steps; replaces the recipe's length.
        lr: Peak learning rate (`optim.lr`).
        batch: Images per optimiser step.
        image_size: Side in pixels, or height and width (`model.image_size`); default: the checkpoint's.
        lora: Rank of LoRA (`model.lora`); default: all weights are trained.
        seed: Seed of the head, data order and augmentation.
        sweep: First try the recipe's learning rates on a held-out part of the training split.
        check_images: Decode images before the first step and name all bad ones: "auto" for 60 seconds, "all" or "none".
        allow_change: Settings in which a run that is resumed may differ from `out`.
        callbacks: Get the events of the run.
        evaluators: Add metrics at every validation.
        report: End with a page in the run folder (`run.report`): an evaluation of the validation images.
        progress: Show progress; default: in notebooks and terminals.
        changes: Any other setting of the recipe: `ema=0.999`, `optim={"weight_decay": 0.1}`, or `**{"data.holdout": 0.1}`.
    """
    reference = _reference(ref)
    settings = recipe_named(recipe) if isinstance(recipe, str) else recipe
    chosen = starting_recipe(reference, None if data is None else os.fspath(data), settings)
    short = {"epochs": epochs, "steps": steps, "optim.lr": lr, "batch": batch, "model.image_size": image_size}
    short |= {"model.lora": lora, "seed": seed}
    chosen = with_changes(chosen, {**{name: value for name, value in short.items() if value is not None}, **changes})
    folder = Path(out) if out is not None else Path("runs") / chosen.name
    with training_progress(shown=progress) as shown:
        result = sweep_and_train(
            chosen,
            folder,
            sweep=sweep,
            say=log.info,
            callbacks=[*shown, *callbacks],
            evaluators=evaluators,
            allow_change=allow_change,
            check_images=image_check(check_images, chosen, say=log.info),
        )
    if report:
        write_run_report(result, partial(progress_bar, "evaluating", shown=progress))
    return Run(folder, result)


def _reference(ref: str | os.PathLike[str] | checkpoints.Bundle) -> str:
    if isinstance(ref, checkpoints.Bundle):
        # A run names its start, so that it can be resumed: weights that are only in memory have no name.
        raise VitrailError(
            "finetune starts from a checkpoint that can be loaded again, not from a loaded one. Pass its reference, such as "
            f"{ref.report.source!r}; save a model that you changed, and pass the folder."
        )
    return os.fspath(ref)


def starting_recipe(start: str | None, data: str | None, recipe: Recipe | None) -> Recipe:
    """Return the recipe of a run: the given one with this start and data, or one whose batch and length follow the number of
    images."""
    if start is None and recipe is not None:
        start = recipe.model.start
    if start is None:
        raise VitrailError("The checkpoint to start from is missing: add --from, such as --from ViT-B/16 or --from runs/digits.")
    if recipe is not None:
        model = dataclasses.replace(recipe.model, start=start)
        source = recipe.data.source if data is None else data
        return recipe.replace(model=model, data=dataclasses.replace(recipe.data, source=source))
    if data is None:
        raise VitrailError(
            "The images to train on are missing: add --data FOLDER (data= in Python), a folder with a folder for each class."
        )
    with _without_warnings():
        images = len(open_source(data, bad_images="skip", ignore_unknown=True).split("train"))
    return any_folder(start, data, images=images, name=f"{short_name(start)}-on-{Path(data.split(':')[-1]).name}")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Count images without a word: the run opens the data again, and warns then."""
    logger, nowhere = logging.getLogger("vitrail.data"), logging.NullHandler()
    logger.addHandler(nowhere)  # without any handler Python itself would print them
    propagated, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(nowhere)


def short_name(start: str) -> str:
    """Return a name for the run's folder: `ViT-B-16-mae` for published weights, else the stem of the file or URL."""
    if is_url(start):
        return Path(unquote(urlsplit(start).path)).stem or "weights"
    return start.replace("/", "-").replace("@", "-") if is_name(start) and not start.startswith("hf:") else Path(start).stem


def with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with settings changed: `{"batch": 8, "optim.lr": 0.01}`, or `{"optim": {"lr": 0.01}}`."""
    values, known = recipe.to_dict(), flatten(recipe)
    flat = dict(_flat(changes))
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if flat.get(length) is not None:
            values[other] = None  # the given one replaces that of the recipe
    for name, value in flat.items():
        if name not in known:
            raise VitrailError(f"There is no setting {name}.{did_you_mean(name, known)} `vitrail finetune --help-all` lists them.")
        part, _, last = name.rpartition(".")
        (values[part] if part else values)[last] = value
    return Recipe.from_dict(values)


def _flat(changes: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in changes.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{path}{name}.")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            pairs += flatten(value, f"{path}{name}.").items()
        else:
            pairs.append((f"{path}{name}", list(value) if isinstance(value, tuple) else value))
    return pairs
