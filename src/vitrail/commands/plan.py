"""`vitrail plan`: what a recipe needs on GPUs that are not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from vitrail.commands.help import Section
from vitrail.commands.recipe_options import CONFIG, RECIPE, check_used, chosen_recipe, parsed, recipe_sections
from vitrail.commands.terminal import Console, say
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.train.plan import Need, Plan


_USED = ("epochs", "steps", "batch", "micro_batch", "precision", "ema", "model", "task", "optim", "schedule")
"""Settings of a recipe that a plan depends on."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The GPUs."""

    gpus: int = 1
    """Number of GPUs."""
    memory: float = 80.0
    """Memory of each GPU in GiB."""
    outputs: int = 1000
    """Number of classes."""
    json: bool = False
    """Print JSON instead of a table."""


def plan(words: list[str]) -> int:
    """Estimate what a recipe needs per GPU: weights, optimiser state, activations, communication, the largest micro-batch.

    No GPU is needed and nothing is trained: one step runs on fake tensors, which have shapes but no data. --micro-batch plans
    for that micro-batch.

    Example: vitrail plan vit-b16-imagenet --gpus 8 --memory 80

    Example: vitrail plan vit-h14-jft --gpus 64 --memory 40 --model.recompute -1 --json
    """
    from vitrail.commands.training_display import group_table
    from vitrail.train.plan import make_plan

    named, rest = chosen_recipe(words, default=None)
    check_used(rest, _USED, "plan")
    recipe, options = parsed(named, rest, Options(), command="plan")
    micro_batch = None if recipe.micro_batch == "auto" else int(recipe.micro_batch)
    progress = partial(Console(stderr=True).print, style="dim", highlight=False, soft_wrap=True)
    progress(f"simulating steps of {recipe.model.name} at several micro-batches: seconds for small models, minutes for the largest")
    made = make_plan(
        recipe, gpus=options.gpus, memory=options.memory, outputs=options.outputs, micro_batch=micro_batch, say=progress
    )
    if options.json:
        needs = [{**dataclasses.asdict(need), "tensors": need.tensors, "total": need.total} for need in made.needs]
        say(to_json({**dataclasses.asdict(made), "needs": needs}, indent=2))
    else:
        console = Console()
        show(made, console)
        group_table(made.groups, recipe, console)
    return 0


def sections(words: list[str]) -> list[Section]:
    """Return the options of `vitrail plan`: its own, and the settings of a recipe that a plan depends on."""
    recipe = replace(RECIPE, metavar="RECIPE", text="The recipe; `vitrail train --recipes` lists them.", required=True)
    return recipe_sections(chosen_recipe(words)[0], Options(), own=(recipe, CONFIG), title="GPUs", used=_USED)


plan.sections = sections  # type: ignore[attr-defined]  # its options are those of the recipe its first word names


def show(made: Plan, console: Console) -> None:
    from vitrail.train.plan import GIB

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
    from vitrail.train.plan import GIB

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
