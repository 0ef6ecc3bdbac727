"""Parse the arguments of a command from its signature; `commands/help.py` prints its help."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args

import tyro
import tyro.constructors

from vitrail.commands.help import HELP, HELP_ALL, Section, print_help, sections_of, usage
from vitrail.commands.terminal import say
from vitrail.errors import VitrailError

R = TypeVar("R")


def parse(command: Callable[..., R], name: str, words: Sequence[str], **options: Any) -> R:
    """Call a command with the arguments given by words; `Mistake` if they are wrong, which has been printed then."""
    try:
        return tyro.cli(  # type: ignore[no-any-return]
            command, prog=f"vitrail {name}", args=list(words), add_help=False, registry=_own_rules(), **options
        )
    except SystemExit as error:
        raise Mistake(error.code) from None
    except _NotFinite as error:
        raise VitrailError(f"{_option_of(words, str(error))} is {error}; it must be a finite number, such as 0.1.") from None


def asks_for_help(words: Sequence[str]) -> bool:
    return any(word in (*HELP.flags, *HELP_ALL.flags) for word in words)


def check_only(words: Sequence[str], *flags: str) -> None:
    """Refuse options that a flag such as --list, which ends the command at once, would leave without effect."""
    extra = next((word for word in words if word not in flags), None)
    if extra is not None:
        raise VitrailError(f"{flags[0]} goes only with {' and '.join(flags[1:])}, not with {extra}. Leave it out.")


class Mistake(SystemExit):
    """Words that a command does not take."""


def call(command: Callable[..., Any], name: str, words: Sequence[str]) -> int | None:
    """Run a command, or print its help. One with `sections` reads its words itself. After a mistake comes a hint."""
    sections = getattr(command, "sections", None)
    if asks_for_help(words):
        plain = [word for word in words if word not in (*HELP.flags, *HELP_ALL.flags)]
        found = sections(plain) if sections else sections_of(command)
        print_help(name, command.__doc__ or "", found, everything="--help-all" in words)
        return None
    try:
        if sections:
            return command(list(words))  # type: ignore[no-any-return]
        return parse(command, name, words, config=(tyro.conf.FlagCreatePairsOff,))  # type: ignore[no-any-return]  # no --no-json
    except Mistake:
        found = sections([]) if sections else sections_of(command)
        lines = [*_translated(words, found), usage(name, found), f"`vitrail {name} --help` explains the options."]
        say("\n".join(lines), file=sys.stderr)
        raise


# Options of other libraries' training scripts, and ours.
_OTHER_NAMES = {
    "--amp": "--precision", "--batch-size": "--batch", "--batch_size": "--batch", "--checkpoint": "--from", "--data-dir": "--data",
    "--data-path": "--data", "--dataset": "--data", "--drop-path": "--model.stochastic-depth", "--img-size": "--image-size",
    "--input-size": "--image-size", "--layer-decay": "--optim.layer-decay", "--learning-rate": "--optim.lr",
    "--learning_rate": "--optim.lr", "--lr": "--optim.lr", "--model": "--model.name", "--model-ema": "--ema",
    "--num-workers": "--workers", "--num_train_epochs": "--epochs", "--opt": "--optim.name", "--optimizer": "--optim.name",
    "--output": "--out", "--output-dir": "--out", "--output_dir": "--out", "--pretrained": "--from", "--topk": "--top",
    "--wd": "--optim.weight-decay", "--weight-decay": "--optim.weight-decay", "--weights": "--from",
}  # fmt: skip


def _translated(words: Sequence[str], sections: Sequence[Section]) -> list[str]:
    """Say what options of other libraries are called here."""
    options = [option for section in sections for option in section.options]
    own = {flag for option in options for flag in option.flags}
    names = {word: name for word, name in _OTHER_NAMES.items() if name in own}
    if options and not options[0].flags and "CHECKPOINT" in options[0].metavar:
        names |= dict.fromkeys(("--checkpoint", "--model", "--weights"), "the first argument, CHECKPOINT,")
    given = dict.fromkeys(word.partition("=")[0] for word in words)
    return [f"{word} is {names[word]} here." for word in given if word not in own and word in names]


class _NotFinite(Exception):  # not a ValueError, which tyro would replace by a message of its own
    """A number that is NaN or infinite."""


def _own_rules() -> tyro.constructors.ConstructorRegistry:
    """Refuse `nan`, `inf` and numbers that overflow to it in every option: most comparisons with them pass or fail in silence.

    Read height and width as 384x512, as `options.parse_size` does, or as 384 512.
    """
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def finite(kind: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[float] | None:
        if kind.type is not float:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="FLOAT",
            instance_from_str=lambda words: _finite(words[0]),
            is_instance=lambda value: isinstance(value, float | int) and not isinstance(value, bool),
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def size(kind: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        kinds = set(get_args(kind.type)) if kind.type_origin in (Union, UnionType) else set()
        if kinds - {NoneType} != {int, tuple[int, int]}:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=(1, 2),
            metavar="INT [INT]",
            instance_from_str=lambda words: None if words == ["None"] and NoneType in kinds else _size(words),
            is_instance=lambda value: value is None or isinstance(value, int | tuple),
            str_from_instance=lambda value: [*map(str, value)] if isinstance(value, tuple) else [str(value)],
        )

    return registry


def _size(words: list[str]) -> int | tuple[int, int]:
    sides = [int(side) for word in words for side in re.split("[x×]", word) if side.isdigit()]
    if len(sides) not in (1, 2) or not re.fullmatch(r"\d+([x× ]\d+)?", " ".join(words)):
        raise ValueError(f"{' '.join(words)!r}; it takes a number of pixels, or height and width such as 384x512")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise _NotFinite(word)
    return value


def _option_of(words: Sequence[str], value: str) -> str:
    """Return the option to which a value was given, as `--option value`, `--option=value` or one of several values."""
    option = "a number"
    for word in words:
        flag, equals, given = word.partition("=")
        option = flag if flag.startswith("--") else option
        if value in (word, given if equals else None):
            break
    return option
