"""Parse the arguments of a command from its signature and docstring, and print its help."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro
import tyro._strings

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
    return tyro.cli(command, prog=f"vitrail {name}", args=list(words), description=wrapped, **options)  # type: ignore[no-any-return]


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
