"""`vitrail plan`: what a recipe needs on GPUs that are not here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast, get_type_hints

import tyro
from rich import box
from rich.table import Table

from vitrail.commands.arguments import parse
from vitrail.commands.finetune import extract_flags
from vitrail.commands.terminal import Console, say
from vitrail.commands.train import parsed
from vitrail.commands.training_display import group_table
from vitrail.errors import VitrailError
from vitrail.recipes import recipe_named
from vitrail.text import to_json
from vitrail.train.config import Recipe
from vitrail.train.plan import GIB, Need, Plan, make_plan

_FLAGS = ("--gpus", "--memory", "--outputs")
_USED = ("epochs", "steps", "batch", "micro_batch", "precision", "ema", "model", "task", "optim", "schedule")
"""Settings of a recipe that a plan depends on."""


def plan(words: list[str]) -> int:
    """Estimate what a recipe needs per GPU: weights, optimiser state, activations, communication, the largest micro-batch.

    No GPU is needed and nothing is trained: one step runs on fake tensors, which have shapes but no data.

    --gpus N         number of GPUs (default: 1)
    --memory GIB     memory of each GPU (default: 80)
    --outputs N      number of classes (default: 1000)
    --json           print JSON instead of a table

    Every setting of the recipe can be changed as in `vitrail train`; those below have an effect on the plan. --micro-batch N plans
    for that micro-batch.

    Example: vitrail plan vit-b16-imagenet --gpus 8 --memory 80

    Example: vitrail plan vit-h14-jft --gpus 64 --memory 40 --model.recompute -1 --json
    """
    given, rest = extract_flags(words, _FLAGS)
    named = bool(rest) and not rest[0].startswith("-")
    if "-h" in rest or "--help" in rest:
        print_help(recipe_named(rest[0] if named else "digits"))
    if not named:
        raise VitrailError("The recipe is missing: `vitrail plan RECIPE`. `vitrail train --recipes` lists them.")
    recipe, options = parsed(recipe_named(rest[0]), rest[1:], command="plan", description=plan.__doc__)
    micro_batch = None if recipe.micro_batch == "auto" else int(recipe.micro_batch)
    begun = f"simulating steps of {recipe.model.name} at several micro-batches: seconds for small models, minutes for the largest"
    Console(stderr=True).print(begun, style="dim", highlight=False, soft_wrap=True)
    made = make_plan(
        recipe,
        gpus=int(_number(given, "--gpus", 1)),
        memory=_number(given, "--memory", 80),
        outputs=int(_number(given, "--outputs", 1000)),
        micro_batch=micro_batch,
    )
    if options.json:
        needs = [{**dataclasses.asdict(need), "tensors": need.tensors, "total": need.total} for need in made.needs]
        say(to_json({**dataclasses.asdict(made), "needs": needs}, indent=2))
    else:
        console = Console()
        show(made, console)
        group_table(made.groups, recipe, console)
    return 0


plan.parses_arguments = True  # type: ignore[attr-defined]  # its options are those of the recipe its first word names


def print_help(recipe: Recipe) -> None:
    """Print the options that have an effect on a plan, and end the program."""
    values = {one.name: getattr(recipe, one.name) for one in dataclasses.fields(recipe)}
    types, suppressed = get_type_hints(Recipe, include_extras=True), cast(Any, tyro.conf.Suppress)
    hidden = [(name, suppressed[types[name]], value) for name, value in values.items() if name not in _USED]
    # A subclass, for which tyro finds the docstrings of the fields.
    shown = dataclasses.make_dataclass("Recipe", hidden, bases=(Recipe,), frozen=True, kw_only=True)
    parse(shown, "plan RECIPE", ["--help"], plan.__doc__, default=shown(**values))


def _number(given: dict[str, str], flag: str, otherwise: float) -> float:
    try:
        value = float(given.get(flag, otherwise))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise VitrailError(f"{flag} is {given[flag]}; it must be a finite number, such as {otherwise:g}.")
    return value


def show(made: Plan, console: Console) -> None:
    height, width = made.image_size
    what = f"{made.model}, {made.parameters:,} parameters, {height}×{width}, batch {made.batch:,}"
    where = f"{made.gpus} GPU{'s' * (made.gpus > 1)} of {made.memory / GIB:g} GiB, {made.precision}"
    console.print(f"{what} on {where}; {_flops(made.flops)} per step", highlight=False, soft_wrap=True)
    console.print(f"schedule: {made.schedule}", highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("per GPU")
    for need in made.needs:
        table.add_column(need.engine, justify="right")
    for words, value in _ROWS:
        table.add_row(words, *(value(need) for need in made.needs))
    console.print(table)
    for need in made.needs:
        if not need.largest_micro_batch:
            console.print(
                f"{need.engine}: not even one image fits. Try --model.recompute -1, more GPUs with fsdp, or larger ones.",
                style="yellow",
            )


def _flops(number: float) -> str:
    return f"{number / 1e12:,.0f} TFLOPs" if number >= 1e13 else f"{number / 1e9:,.1f} GFLOPs"


def _size(number: int) -> str:
    return f"{number / GIB:,.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:,.1f} MiB"


_ROWS: tuple[tuple[str, Callable[[Need], str]], ...] = (
    ("largest micro-batch", lambda need: f"{need.largest_micro_batch:,}"),
    ("micro-batch × accumulation", lambda need: f"{need.micro_batch:,} × {need.accumulation:,}"),
    ("weights", lambda need: _size(need.weights)),
    ("gradients", lambda need: _size(need.gradients)),
    ("optimiser state", lambda need: _size(need.optimizer)),
    ("averaged weights", lambda need: _size(need.average) if need.average else "–"),
    ("activations", lambda need: _size(need.activations)),
    ("total allocated by torch", lambda need: _size(need.tensors)),
    ("with CUDA context and fragmentation", lambda need: _size(need.total)),
    ("communication per step", lambda need: _size(need.communication) if need.communication else "–"),
)
