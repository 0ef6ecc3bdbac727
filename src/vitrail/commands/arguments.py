"""Parse the arguments of a command from its signature and docstring, and print its help."""

from __future__ import annotations

import inspect
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro
import tyro._strings
import tyro.constructors

from vitrail.errors import VitrailError

R = TypeVar("R")


_ARGUMENTS = "\n\nArgs:\n"


class _Wrapped(str):
    """Text with the line breaks that it is printed with."""

    __slots__ = ()


def parse(command: Callable[..., R], name: str, words: Sequence[str], description: str | None = None, **options: Any) -> R:
    """Call a command with the arguments given by words; `--help` and mistakes end the program.

    The help begins with the description; default: the command's docstring up to its arguments.
    """
    about, _, arguments = inspect.cleandoc(command.__doc__ or "").partition(_ARGUMENTS)
    # tyro breaks lines where the source does: in arguments of a function, and before lines that begin with a space or a bracket.
    command.__doc__ = about + _ARGUMENTS + re.sub(r"\n {8,}", " ", arguments)
    tyro._strings.remove_single_line_breaks = join_lines  # type: ignore[assignment]
    wrapped = _wrap(inspect.cleandoc(description) if description else about, shutil.get_terminal_size().columns)
    try:
        return tyro.cli(  # type: ignore[no-any-return]
            command, prog=f"vitrail {name}", args=list(words), description=wrapped, registry=_finite_numbers(), **options
        )
    except _NotFinite as error:
        raise VitrailError(f"{_option_of(words, str(error))} is {error}; it must be a finite number, such as 0.1.") from None


class _NotFinite(Exception):  # not a ValueError, which tyro would replace by a message of its own
    """A number that is NaN or infinite."""


def _finite_numbers() -> tyro.constructors.ConstructorRegistry:
    """Refuse `nan`, `inf` and numbers that overflow to it in every option: most comparisons with them pass or fail in silence."""
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

    return registry


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


def join_lines(text: str) -> str:
    """Join the lines of each paragraph, but not items of a list, which begin with a hyphen."""
    if isinstance(text, _Wrapped):
        return text
    joined: list[str] = []
    for line in map(str.strip, text.split("\n")):
        if joined and joined[-1] and line and not line.startswith("-"):
            joined[-1] += f" {line}"
        else:
            joined.append(line)
    return "\n".join(joined).strip()


def _wrap(text: str, width: int) -> _Wrapped:
    lines = join_lines(text).split("\n")
    return _Wrapped("\n".join(textwrap.fill(line, width, subsequent_indent=_indent(line), **_WORDS) for line in lines))


_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


def _indent(line: str) -> str:
    """Return the indentation of a list item's second line: `--flag VALUE    its description`."""
    if not line.startswith("-"):
        return ""
    _, gap, rest = line.partition("  ")
    return " " * (len(line) - len(rest.lstrip())) if gap else "  "
