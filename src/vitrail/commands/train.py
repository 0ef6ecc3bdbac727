"""`vitrail train`: a recipe, any of its settings changed, into a run folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.table import Table

from vitrail.commands.arguments import parse
from vitrail.commands.output import TolerantOutput
from vitrail.commands.terminal import Console, say
from vitrail.commands.training_display import deviations, display_for, group_table, name_patterns, print_result
from vitrail.errors import VitrailError
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.fewshot import FewShotEvaluator, FewShotSpec
from vitrail.recipes import RECIPES, recipe_named, summary
from vitrail.text import to_json
from vitrail.train.callbacks import Callback, TensorBoard, WeightsAndBiases
from vitrail.train.config import Recipe, flatten
from vitrail.train.loop import CheckImages, MakeEvaluator
from vitrail.train.optimizers import explain as explain_update
from vitrail.train.parallel import World
from vitrail.train.parameter_groups import all_groups, freeze
from vitrail.train.prepare import Prepared
from vitrail.train.sweep import sweep_and_train

# Flags of every command that reads images, as sentences advise them; a recipe keeps these settings under `data`.
SHARED = {flag: flag.replace("--", "--data.") for flag in ("--bad-images", "--ignore-unknown-classes", "--preprocess", "--workers")}
SHARED["--data"] = "--data.source"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a recipe."""

    out: Path | None = None
    """The run folder; runs/NAME by default. Run the same command again to resume."""
    allow_change: tuple[str, ...] = ()
    """Settings that may differ from those the run started with, such as optim.lr."""
    sweep: bool = False
    """First try the recipe's learning rates on a held-out part of the training split, then train with the best."""
    few_shot: tuple[int, ...] = ()
    """Also report few-shot accuracy at every validation, with this many training images per class, for example --few-shot 5."""
    tensorboard: bool = False
    """Also write TensorBoard logs to the run folder."""
    wandb: str | None = None
    """Also log to this Weights & Biases project."""
    explain: bool = False
    """Print the whole recipe, the update rule and the parameter groups, and stop."""
    plain: bool = False
    """Print plain lines instead of a live display."""
    json: bool = False
    """Print only the result, as JSON."""


def train(words: list[str]) -> int:
    """Train a model with a recipe: `vitrail train [RECIPE] [OPTIONS]`. Any setting of the recipe can be changed.

    Example: vitrail train                                        (a tiny ViT on the embedded digits)

    Example: vitrail train digits --optim.lr 1e-3 --epochs 20 --out runs/slow

    Example: torchrun --nproc-per-node 8 -m vitrail train vit-s16-imagenet --data folder:/data/imagenet

    --data SRC is short for --data.source SRC. `vitrail train --recipes` lists the recipes; default: `digits`. The defaults below
    are those of the recipe.
    """
    if "--recipes" in words:
        print_recipes(as_json="--json" in words)
        return 0
    named = bool(words) and not words[0].startswith("-")
    recipe = recipe_named(words[0] if named else "digits")
    chosen, options = parsed(recipe, words[1:] if named else words, command="train", description=train.__doc__)
    return run(recipe, chosen, options)


train.parses_arguments = True  # type: ignore[attr-defined]  # its options are those of the recipe its first word names


def shared_flags(words: list[str]) -> list[str]:
    """Write flags of every command that reads images as the recipe's settings."""
    return [SHARED.get(flag, flag) + equals + value for flag, equals, value in (word.partition("=") for word in words)]


def parsed(recipe: Recipe, words: list[str], *, command: str, description: str | None) -> tuple[Recipe, Options]:
    """Return the recipe with the given options changed; an unknown one ends the program with a hint."""
    words = shared_flags(words)
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if any(word.split("=")[0] == f"--{length}" for word in words):
            recipe = recipe.replace(**{other: None})  # the given one replaces that of the recipe

    def collect(
        recipe: Annotated[Recipe, tyro.conf.arg(name="")] = recipe,
        options: Annotated[Options, tyro.conf.arg(name="")] = Options(),
    ) -> tuple[Recipe, Options]:
        return recipe, options

    return parse(collect, command, words, description)


def run(recipe: Recipe, chosen: Recipe, options: Options, *, check_images: CheckImages | None = None) -> int:
    """Train `chosen`, which may differ from its `recipe`, and show it."""
    console = Console(file=TolerantOutput(sys.stderr if options.json else sys.stdout), quiet=options.json)
    with warnings_on(console):
        return _run(recipe, chosen, options, console, check_images)


def _run(recipe: Recipe, chosen: Recipe, options: Options, console: Console, check_images: CheckImages | None) -> int:
    out = options.out or Path("runs") / chosen.name
    if options.explain:
        explain(chosen, console)
        return 0
    if main_rank():
        deviations(recipe, chosen, console)
    callbacks: list[Callback] = [] if options.json else [display_for(console, plain=options.plain)]
    callbacks += [TensorBoard()] if options.tensorboard else []
    callbacks += [WeightsAndBiases(options.wandb)] if options.wandb else []
    result = sweep_and_train(
        chosen,
        out,
        sweep=options.sweep,
        say=partial(console.print, soft_wrap=True, highlight=False),
        callbacks=callbacks,
        evaluators=[_few_shot(options.few_shot)] if options.few_shot else [],
        allow_change=options.allow_change,
        check_images=check_images,
    )
    if options.json and main_rank():
        say(to_json(result.summary()))
    elif main_rank():
        print_result(result, console)
    return 0 if result.ended_by is None else 128 + result.ended_by  # as a shell reports it: the run is not finished


def _few_shot(shots: tuple[int, ...]) -> MakeEvaluator:
    """The paper's few-shot metric: a closed-form classifier on frozen features, from the training to the validation split."""

    def make(prepared: Prepared, world: World) -> FewShotEvaluator:
        if prepared.validation is None or prepared.train.task != "classify":
            raise VitrailError("--few-shot needs one label per image and a validation split.")
        protocol = FewShotSpec(shots=shots, small_classes="drop")
        context = EvalContext(world=world)
        return FewShotEvaluator(prepared.train, prepared.validation, prepared.preprocess, protocol=protocol, context=context)

    return make


def explain(recipe: Recipe, console: Console) -> None:
    """Print the whole recipe and what follows from it."""
    from vitrail.train.prepare import prepare

    prepared = prepare(recipe)
    table = Table(title=f"Recipe {recipe.name}", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("setting")
    table.add_column("value")
    for name, value in flatten(recipe).items():
        if value is not None:
            table.add_row(name, str(value))
    console.print(table)
    for note in prepared.notes:
        console.print(note, soft_wrap=True, highlight=False)
    console.print(
        f"\nupdate: {explain_update(recipe.optim)}; s is the {recipe.schedule.kind} schedule", soft_wrap=True, highlight=False
    )
    freeze(prepared.trained, recipe.optim, head_only=recipe.model.freeze)
    group_table(all_groups(prepared.trained, recipe.optim), recipe, console)
    names = name_patterns([name for name, _ in prepared.trained.named_parameters()])
    console.print(f"names for patterns: {', '.join(names)}", soft_wrap=True, highlight=False)


def print_recipes(*, as_json: bool) -> None:
    recipes = {name: recipe_named(name) for name in RECIPES}
    if as_json:
        rows = [{"name": name, "what": summary(name), "expected": recipe.expected} for name, recipe in recipes.items()]
        say(to_json(rows, indent=2))
        return
    console, what = Console(), ""
    for name, recipe in recipes.items():
        if summary(name) != what:
            what = summary(name)
            console.print(f"\n{what}", style="bold", highlight=False)
        length = f"{recipe.epochs:g} epochs" if recipe.epochs else f"{recipe.steps:,} steps"
        console.print(f"  {name:<28} {length:>12}, batch {recipe.batch:<5} {recipe.expected}", highlight=False, soft_wrap=True)


def main_rank() -> bool:
    """Whether this process is the one that prints."""
    import os

    return os.environ.get("RANK", "0") == "0"


@contextmanager
def warnings_on(console: Console) -> Iterator[None]:
    """Show the package's warnings on the console meanwhile."""
    logger, handler = logging.getLogger("vitrail"), _Warnings(console)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Warnings(logging.Handler):
    """Shows warnings of the package on the console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        if main_rank():
            self.console.print(f"warning: {record.getMessage()}", style="yellow", soft_wrap=True, highlight=False)
