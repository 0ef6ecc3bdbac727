"""`vitrail data sheet`: show the augmented training images of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitrail.commands.help import Section
from vitrail.commands.output import check_output_file
from vitrail.commands.recipe_options import CONFIG, RECIPE, check_used, chosen_recipe, parsed, recipe_sections
from vitrail.commands.terminal import Console, say
from vitrail.text import to_json
from vitrail.train.config import Recipe

_USED = ("data", "augment", "seed", "model.name", "model.start", "model.image_size", "model.channels", "model.patch")
"""Settings of a recipe that decide what the images look like."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to show."""

    out: Path = Path("augmented.png")
    """The PNG file to write."""
    overwrite: bool = False
    """Replace an existing file."""
    rows: int = 8
    """Images, of as many classes as possible."""
    columns: int = 8
    """Epochs."""
    json: bool = False
    """Print JSON instead of text."""


def sheet(words: list[str]) -> int:
    """Show training images as the model sees them, augmented as in a recipe. Any setting that matters can be changed.

    Example: vitrail data sheet deit-s16-imagenet --data folder:photos

    Example: vitrail data sheet digits --augment.randaugment timm --augment.mixup 0 --out digits.png

    The defaults below are those of the recipe.
    """
    recipe, rest = chosen_recipe(words)
    check_used(rest, _USED, "data sheet")
    chosen, options = parsed(recipe, rest, Options(), command="data sheet")
    check_output_file(options.out, overwrite=options.overwrite)
    draw_sheet(chosen, options)
    return 0


def sections(words: list[str]) -> list[Section]:
    """Return the options of `vitrail data sheet`: its own, and the settings of a recipe that decide what images look like."""
    return recipe_sections(chosen_recipe(words)[0], Options(), own=(RECIPE, CONFIG), title="the sheet", used=_USED)


sheet.sections = sections  # type: ignore[attr-defined]  # its options are those of the recipe its first word names


def draw_sheet(recipe: Recipe, options: Options) -> None:
    from vitrail.data.augment_sheet import augment_sheet
    from vitrail.train.prepare import chosen_splits, make_model, opened_source

    train, _ = chosen_splits(recipe, opened_source(recipe))
    _, preprocess = make_model(recipe, len(train.classes), train.classes, [], on_meta=True)
    augment_sheet(
        train,
        preprocess,
        recipe.augment,
        options.out,
        rows=options.rows,
        columns=options.columns,
        seed=recipe.seed,
        bad_images=recipe.data.bad_images,
    )
    if options.json:
        say(to_json({"out": str(options.out), "preprocess": preprocess.to_dict(), "augment": recipe.augment.to_dict()}))
    else:
        Console().print(f"Augmented images: {options.out}", highlight=False, soft_wrap=True)
