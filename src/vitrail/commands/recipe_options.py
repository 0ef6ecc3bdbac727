"""The options of commands that take a recipe: a recipe by name or from a file, and every setting of it as an option."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from vitrail.commands.arguments import parse
from vitrail.commands.help import HELP, HELP_ALL, Option, Section, dataclass_sections
from vitrail.errors import VitrailError, reason_of
from vitrail.recipes import recipe_named
from vitrail.regular_files import read_json_object
from vitrail.train.config import Recipe
from vitrail.train.upgrade import upgrade

T = TypeVar("T")

# Options that have the same name in every command; a recipe keeps these settings in its parts.
SHARED = {
    "--data": "--data.source",
    "--workers": "--data.workers",
    "--bad-images": "--data.bad-images",
    "--ignore-unknown-classes": "--data.ignore-unknown-classes",
    "--no-ignore-unknown-classes": "--data.no-ignore-unknown-classes",
    "--preprocess": "--data.preprocess",
    "--image-size": "--model.image-size",
    "--from": "--model.start",
}
_SHORT = {setting: flag for flag, setting in SHARED.items()}
# What most runs change, in the order of the help.
COMMON = (
    "--gpus", "--memory", "--outputs", "--rows", "--columns",
    "--data", "--model.name", "--from", "--image-size", "--epochs", "--steps", "--batch", "--optim.lr",
    "--optim.weight-decay", "--schedule.warmup", "--out", "--precision", "--device", "--workers", "--bad-images", "--seed",
    "--eval-every", "--explain", "--json",
)  # fmt: skip
RECIPE = Option((), "[RECIPE]", "The recipe to start from, digits if none is given; `vitrail train --recipes` lists them.")
CONFIG = Option(
    ("--config",), "FILE", "Start from the settings of an earlier run, its config.json, instead of a recipe; options change them."
)


def shared_flags(words: Sequence[str]) -> list[str]:
    """Write options that have the same name in every command as the recipe's settings."""
    return [SHARED.get(flag, flag) + equals + value for flag, equals, value in (word.partition("=") for word in words)]


def chosen_recipe(words: Sequence[str], *, default: str | None = "digits") -> tuple[Recipe, list[str]]:
    """Return the recipe that the first word or --config names, and the other words."""
    given, rest = extract_flags(words, ("--config",))
    named = bool(rest) and not rest[0].startswith("-")
    if "--config" in given:
        if named:
            raise VitrailError(f"Both the recipe {rest[0]} and --config {given['--config']} were given; leave one out.")
        return read_recipe(Path(given["--config"])), rest
    if not named and default is None:
        raise VitrailError("The recipe is missing: name one (`vitrail train --recipes` lists them), or a file with --config.")
    return recipe_named(rest[0] if named else str(default)), rest[1:] if named else rest


def read_recipe(file: Path) -> Recipe:
    """Return the recipe in a run's config.json, or in what `--explain --json` printed."""
    path = file / "config.json" if file.is_dir() else file
    try:
        config = read_json_object(path)
        if "recipe" not in config:  # that of a checkpoint, for example; its format is another one
            raise KeyError("recipe")
        return Recipe.from_dict(upgrade(config)["recipe"])
    except FileNotFoundError as error:
        raise VitrailError(f"There is no file {path}. --config takes the config.json of a run.") from error
    except VitrailError as error:
        raise VitrailError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VitrailError(
            f"{path} holds no recipe ({reason_of(error)}). "
            "--config takes the config.json of a run, or what --explain --json printed."
        ) from error


def extract_flags(words: Sequence[str], flags: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of some flags, as `--flag value` or `--flag=value`, and the other words."""
    given: dict[str, str] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in flags:
            rest.append(word)
        elif equals or left:
            given[flag] = value if equals else left.pop(0)
        else:
            raise VitrailError(f"{flag} needs a value after it.")
    return given, rest


def parsed(recipe: Recipe, words: Sequence[str], options: T, *, command: str) -> tuple[Recipe, T]:
    """Return the recipe and the command's own options with the given ones changed; an unknown one ends the program with a hint."""
    words = shared_flags(words)
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if any(word.split("=")[0] == f"--{length}" for word in words):
            recipe = recipe.replace(**{other: None})  # the given one replaces that of the recipe
    kind: Any = type(options)

    def collect(recipe: Any = recipe, options: Any = options) -> Any:
        return recipe, options

    own = Annotated[kind, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]
    collect.__annotations__ = {"recipe": Annotated[Recipe, tyro.conf.arg(name="")], "options": own}
    chosen: tuple[Recipe, T] = parse(collect, command, words)
    return chosen


def check_used(words: Sequence[str], used: Collection[str], command: str) -> None:
    """Refuse settings of a recipe that a command ignores. `used` holds settings, or first parts of them."""
    for word, setting_word in zip(words, shared_flags(words), strict=True):
        setting = setting_word.partition("=")[0].removeprefix("--").replace("-", "_")
        if not word.startswith("--") or setting in used or setting.partition(".")[0] in used:
            continue
        if setting.partition(".")[0] in (field.name for field in dataclasses.fields(Recipe)):
            raise VitrailError(f"{word.partition('=')[0]} has no effect on `vitrail {command}`. Leave it out.")


def recipe_sections(
    recipe: Recipe, options: Any, *, own: Sequence[Option] = (), title: str = "running", used: Collection[str] | None = None
) -> list[Section]:
    """Return the common options, then those of the command, then every other setting of the recipe.

    `own` are options that the command reads itself. `used`: only these settings, or parts of the recipe.
    """
    settings = [
        Section(one.title, tuple(_short(option) for option in one.options if used is None or _is_used(option, used)))
        for one in dataclass_sections(Recipe, recipe, "", "run", pairs=True)
    ]
    mine = dataclass_sections(type(options), options, "", title)[0]
    flags = {flag for option in own for flag in option.flags}
    sections = [Section(one.title, tuple(o for o in one.options if not flags & {*o.flags})) for one in (mine, *settings)]
    every = {flag: option for one in sections for option in one.options for flag in option.flags}
    common = tuple(every[flag] for flag in COMMON if flag in every)
    first, *rest = (Section(one.title, tuple(option for option in one.options if option not in common)) for one in sections)
    return [
        Section("arguments", tuple(option for option in own if not option.flags)),
        Section("common options", (*(option for option in own if option.flags), *common, HELP, HELP_ALL)),
        first,
        *(dataclasses.replace(one, common=False) for one in rest),
    ]


def _is_used(option: Option, used: Collection[str]) -> bool:
    setting = option.flags[0].removeprefix("--").replace("-", "_")
    return setting in used or setting.partition(".")[0] in used


def _short(option: Option) -> Option:
    return dataclasses.replace(option, flags=tuple(_SHORT.get(flag, flag) for flag in option.flags))
