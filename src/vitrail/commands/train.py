"""`vitrail train`: a recipe, any of its settings changed, into a run folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from vitrail.commands.arguments import check_only
from vitrail.commands.help import Option, Section
from vitrail.commands.output import TolerantOutput, check_place
from vitrail.commands.recipe_options import CONFIG, RECIPE, chosen_recipe, parsed, recipe_sections
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError
from vitrail.evaluate.settings import FewShotSpec
from vitrail.recipes import RECIPES, recipe_named, summary
from vitrail.text import to_json
from vitrail.train.config import Recipe
from vitrail.train.plain import flatten
from vitrail.train.upgrade import FORMAT

if TYPE_CHECKING:
    from vitrail.evaluate.fewshot import FewShotEvaluator
    from vitrail.train.callbacks import Callback
    from vitrail.train.loop import CheckImages, MakeEvaluator
    from vitrail.train.parallel import World
    from vitrail.train.prepare import Prepared
    from vitrail.train.result import Result


RECIPES_FLAG = Option(("--recipes",), "", "List all recipes and exit.")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a recipe."""

    out: Path | None = None
    """The run folder. Run the same command again to resume. None: runs/NAME, by the name of the recipe."""
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
    report: bool = True
    """End with a page in the run folder: an evaluation of the validation images.
    --no-report: Write no evaluation page at the end."""
    explain: bool = False
    """Print the whole recipe, the update rule and the parameter groups, and stop. With --json: the recipe for --config."""
    plain: bool = False
    """Print plain lines instead of a live display."""
    json: bool = False
    """Print only the result, as JSON."""


def train(words: list[str]) -> int:
    """Train a model with a recipe, or resume a run. Any setting of the recipe can be changed.

    Example: vitrail train

    Example: vitrail train digits --optim.lr 1e-3 --epochs 20 --out runs/slow

    Example: vitrail train --config runs/slow/config.json --seed 1 --out runs/slow-1

    Example: torchrun --nproc-per-node 8 -m vitrail train vit-s16-imagenet --data folder:/data/imagenet

    Without a recipe, a tiny ViT is trained on the embedded digits. The defaults below are those of the recipe.
    """
    if "--recipes" in words:
        check_only(words, "--recipes", "--json")
        print_recipes(as_json="--json" in words)
        return 0
    recipe, rest = chosen_recipe(words)
    chosen, options = parsed(recipe, rest, Options(), command="train")
    return run(recipe, chosen, options)


def sections(words: list[str]) -> list[Section]:
    """Return the options of `vitrail train`, with the defaults of the recipe that is named."""
    return recipe_sections(chosen_recipe(words)[0], Options(), own=(RECIPE, CONFIG, RECIPES_FLAG))


train.sections = sections  # type: ignore[attr-defined]  # its options are those of the recipe its first word names


def run(recipe: Recipe, chosen: Recipe, options: Options, *, check_images: CheckImages | None = None) -> int:
    """Train `chosen`, which may differ from its `recipe`, and show it."""
    console = Console(file=TolerantOutput(sys.stderr if options.json else sys.stdout), quiet=options.json)
    with warnings_on(console):
        return _run(recipe, chosen, options, console, check_images)


def _run(recipe: Recipe, chosen: Recipe, options: Options, console: Console, check_images: CheckImages | None) -> int:
    from vitrail.commands.training_display import deviations, display_for, print_result
    from vitrail.train.callbacks import TensorBoard, WeightsAndBiases
    from vitrail.train.sweep import sweep_and_train

    out = options.out or Path("runs") / chosen.name
    check_place(out)
    if options.explain and options.json:
        say(to_json({"format": FORMAT, "recipe": chosen.to_dict()}, indent=2))
        return 0
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
    page = _page(result, console, hidden=options.json) if options.report else None
    if options.json and main_rank():
        say(to_json({**result.summary(), "report": None if page is None else str(page)}))
    elif main_rank():
        print_result(result, console, page)
    return 0 if result.ended_by is None else 128 + result.ended_by  # as a shell reports it: the run is not finished


def _page(result: Result, console: Console, *, hidden: bool) -> Path | None:
    """Write the evaluation page of a finished run."""
    from vitrail.api.run_report import write_run_report
    from vitrail.commands.options import progress_bar

    return write_run_report(result, partial(progress_bar, console, "evaluating", hidden=hidden))


def _few_shot(shots: tuple[int, ...]) -> MakeEvaluator:
    """The paper's few-shot metric: a closed-form classifier on frozen features, from the training to the validation split."""
    from vitrail.evaluate.context import EvalContext
    from vitrail.evaluate.fewshot import FewShotEvaluator

    def make(prepared: Prepared, world: World) -> FewShotEvaluator:
        if prepared.validation is None or prepared.train.task != "classify":
            found = "no validation split" if prepared.validation is None else f"the task {prepared.train.task!r}"
            raise VitrailError(
                f"This dataset has {found}; --few-shot needs one label per image and a validation split. Leave it out."
            )
        protocol = FewShotSpec(shots=shots, small_classes="drop")
        context = EvalContext(world=world)
        return FewShotEvaluator(prepared.train, prepared.validation, prepared.preprocess, protocol=protocol, context=context)

    return make


def explain(recipe: Recipe, console: Console) -> None:
    """Print the whole recipe and what follows from it."""
    from vitrail.commands.training_display import group_table, name_patterns
    from vitrail.train.optimizers import explain as explain_update
    from vitrail.train.parameter_groups import all_groups, freeze
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
            console.print(f"\n{what}", style="bold", highlight=False, soft_wrap=True)
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
