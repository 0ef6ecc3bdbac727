"""Experiments: each a function that returns a `Recipe`, in a short file that gives the command and the expected metric."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from vitrail.errors import VitrailError, did_you_mean
from vitrail.train.config import Recipe

__all__ = ["RECIPES", "recipe_named", "summary"]

# Each file, and the recipes in it, in the order in which they are listed.
_FILES = (
    "digits", "cifar10_scratch", "tiny_imagenet", "plain_vit", "deit", "paper_pretrain", "paper_finetune", "augreg", "bit",
    "masked_patch", "mae", "imagenette", "small_transfer",
)  # fmt: skip


def _collected() -> Mapping[str, Callable[[], Recipe]]:
    recipes: dict[str, Callable[[], Recipe]] = {}
    for file in _FILES:
        recipes |= importlib.import_module(f"vitrail.recipes.{file}").RECIPES
    return recipes


RECIPES = _collected()


def recipe_named(name: str) -> Recipe:
    """Return the recipe of that name, as it was written down."""
    if name not in RECIPES:
        raise VitrailError(f"There is no recipe {name!r}.{did_you_mean(name, RECIPES)} `vitrail train --recipes` lists them.")
    return RECIPES[name]()


def summary(name: str) -> str:
    """Return what a recipe is: the first line of its file."""
    function = RECIPES[name]
    inner = getattr(function, "func", function)
    text = (importlib.import_module(inner.__module__).__doc__ or "").strip()  # `python -OO` has none
    return text.partition("\n")[0].rstrip(":.")
