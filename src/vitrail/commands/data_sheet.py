"""`vitrail data sheet`: show the augmented training images of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitrail.commands.arguments import parse
from vitrail.commands.terminal import Console, say
from vitrail.commands.train import shared_flags
from vitrail.data.augment_sheet import augment_sheet
from vitrail.recipes import recipe_named
from vitrail.text import to_json
from vitrail.train.config import Recipe
from vitrail.train.prepare import chosen_splits, make_model, opened_source


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to show."""

    sheet: Path = Path("augmented.png")
    """The PNG file to write."""
    rows: int = 8
    """Images, of as many classes as possible."""
    columns: int = 8
    """Epochs."""
    json: bool = False
    """Print JSON instead of text."""


def sheet(words: list[str]) -> int:
    """Show training images as the model sees them: `vitrail data sheet [RECIPE] [OPTIONS]`. Any setting can be changed.

    Example: vitrail data sheet deit-s16-imagenet --data folder:photos

    Example: vitrail data sheet digits --augment.randaugment timm --augment.mixup 0 --sheet digits.png

    `vitrail train --recipes` lists the recipes; default: `digits`. The defaults below are those of the recipe.
    """
    named = bool(words) and not words[0].startswith("-")
    recipe = recipe_named(words[0] if named else "digits")

    def collect(
        recipe: Annotated[Recipe, tyro.conf.arg(name="")] = recipe,
        options: Annotated[Options, tyro.conf.arg(name="")] = Options(),
    ) -> tuple[Recipe, Options]:
        return recipe, options

    arguments = shared_flags(words[1:] if named else words)
    chosen, options = parse(collect, "data sheet", arguments, sheet.__doc__)
    draw_sheet(chosen, options)
    return 0


sheet.parses_arguments = True  # type: ignore[attr-defined]  # its options are those of the recipe its first word names


def draw_sheet(recipe: Recipe, options: Options) -> None:
    train, _ = chosen_splits(recipe, opened_source(recipe))
    _, preprocess = make_model(recipe, len(train.classes), train.classes, [], on_meta=True)
    augment_sheet(train, preprocess, recipe.augment, options.sheet, rows=options.rows, columns=options.columns, seed=recipe.seed)
    if options.json:
        say(to_json({"sheet": str(options.sheet), "preprocess": preprocess.to_dict(), "augment": recipe.augment.to_dict()}))
    else:
        Console().print(f"Augmented images: {options.sheet}", highlight=False, soft_wrap=True)
