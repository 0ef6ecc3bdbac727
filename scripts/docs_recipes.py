"""The page of all recipes of the documentation site: their settings, and the expected metric with its source."""

from __future__ import annotations

from vitrail.recipes import RECIPES, recipe_named, summary
from vitrail.train.config import Recipe


def recipes() -> str:
    """Return the page: one table per file of recipes."""
    parts = [
        "# All recipes",
        "Generated from the code. *Expected* is what `vitrail train --recipes` shows, with its source in brackets; measured means "
        "here, once unless seeds are given ([records](../evidence.md#accuracy)). A recipe without an expected value has none in "
        "its source, and has not been run here.",
    ]
    groups: dict[str, list[str]] = {}
    for name in RECIPES:
        groups.setdefault(summary(name), []).append(name)
    for title, names in groups.items():
        rows = [_row(name, recipe_named(name)) for name in names]
        parts += [
            f"## {title}",
            "\n".join(["| recipe | model | length | batch | learning rate | expected |", "|---|---|---|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def _row(name: str, recipe: Recipe) -> str:
    length = f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs:g} epochs" if recipe.epochs else ""
    cells = (f"`{name}`", recipe.model.name, length, str(recipe.batch), f"{recipe.optim.name} {recipe.optim.lr:g}", recipe.expected)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
