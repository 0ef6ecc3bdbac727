"""The options of a command, from its signature and docstrings: for its help and for the completion of shells.

Nothing here imports what a command works with, so that `--help` answers at once.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from vitrail.commands.terminal import say

WIDTH = 80
_TEXT = 26  # column where texts begin
_ARGUMENTS = "\n\nArgs:\n"
# Texts that are paths, names or references, by the last part of an option's name; any other text is STR.
_WORDS = {
    "data": "SOURCE", "source": "SOURCE", "target": "SOURCE", "calibrate": "SOURCE", "split": "SPLIT", "train": "SPLIT",
    "test": "SPLIT", "validate": "SPLIT", "calibrate_split": "SPLIT", "preprocess": "PRESET", "device": "DEVICE",
    "start": "CHECKPOINT", "teacher": "CHECKPOINT", "compare": "CHECKPOINT", "from": "CHECKPOINT", "recipe": "RECIPE",
    "keep_best": "METRIC", "allow_change": "SETTING", "freeze": "PATTERN", "drop": "PATTERN", "tasks": "TASK", "root": "DIR",
    "lr_scale": "PATTERN=FACTOR", "weight_decay_for": "PATTERN=VALUE", "wandb": "PROJECT", "warmup": "LENGTH",
    "cooldown": "LENGTH", "host": "ADDRESS", "cors": "ORIGIN", "name": "NAME", "against": "LIBRARY", "model": "MODEL",
    "train_split": "SPLIT", "mode": "LIBRARY:MODE", "image_size": "SIZE", "split_rule": "RULE", "holdout_rule": "RULE",
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One option, or one positional argument."""

    flags: tuple[str, ...]
    """As they are written; empty for a positional argument."""
    metavar: str
    text: str
    default: str = ""
    """What the help shows; empty: nothing."""
    choices: tuple[str, ...] = ()
    required: bool = False

    def with_text(self, text: str) -> Option:
        return dataclasses.replace(self, text=text)


@dataclass(frozen=True)
class Section:
    """Options that belong together, under a title."""

    title: str
    options: tuple[Option, ...]
    common: bool = True
    """Otherwise only --help-all shows it."""


@dataclass(frozen=True)
class Marks:
    """What `Annotated` says about an argument."""

    name: str | None = None
    metavar: str | None = None
    positional: bool = False


HELP = Option(("-h", "--help"), "", "Show this help and exit.")
HELP_ALL = Option(("--help-all",), "", "Show all options and exit.")


def sections_of(command: Callable[..., Any], *, pairs: bool = False) -> list[Section]:
    """Return the arguments and options of a function; those of a dataclass among its parameters form a section of their own.

    `pairs`: a flag can be given in both forms, `--x` and `--no-x`.
    """
    hints, texts = get_type_hints(command, include_extras=True), argument_texts(command.__doc__ or "")
    positional: list[Option] = []
    own: list[Option] = []
    others: list[Section] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind, marks = _unwrap(hints[name])
        default = parameter.default
        if dataclasses.is_dataclass(kind):
            prefix = f"{marks.name}." if marks.name else "" if marks.name == "" else f"{name}."
            others += dataclass_sections(kind, default, prefix, texts.get(name, ""), pairs=pairs)
            continue
        empty = default is inspect.Parameter.empty
        if marks.positional or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            metavar = marks.metavar or _metavar(kind, name)
            positional.append(Option((), metavar, _about(texts.get(name, ""), default), required=empty))
            continue
        flag = marks.name or name.removesuffix("_")
        own.append(_option(flag, kind, default, texts.get(name, ""), pairs=pairs, required=empty, metavar=marks.metavar))
    sections = [Section("arguments", tuple(positional))] if positional else []
    return [*sections, Section("options", (*own, HELP)), *others]


def dataclass_sections(kind: Any, default: Any, prefix: str, title: str, *, pairs: bool = False) -> list[Section]:
    """Return the fields of a dataclass as a section, and those of dataclasses in it as further ones."""
    hints, texts = get_type_hints(kind, include_extras=True), field_texts(kind)
    own: list[Option] = []
    others: list[Section] = []
    for field in dataclasses.fields(kind):
        inner, _ = _unwrap(hints[field.name])
        value = getattr(default, field.name)
        if dataclasses.is_dataclass(inner):
            about = inspect.cleandoc(inner.__doc__ or field.name).partition("\n\n")[0]
            others += dataclass_sections(inner, value, f"{prefix}{field.name}.", about, pairs=pairs)
            continue
        own.append(_option(prefix + field.name.removesuffix("_"), inner, value, texts.get(field.name, ""), pairs=pairs))
    return [Section(_join(title).rstrip("."), tuple(own)), *others]


def _option(
    name: str, kind: Any, default: Any, text: str, *, pairs: bool, required: bool = False, metavar: str | None = None
) -> Option:
    group, _, last = name.replace("_", "-").rpartition(".")
    dotted = f"{group}." if group else ""
    yes, no = f"--{dotted}{last}", f"--{dotted}no-{last}"
    about, _, negative = text.partition(f"--no-{last}: ")
    if kind is bool:
        if pairs:
            return Option((yes, no), "", _about(about, default), default=yes if default else no)
        return Option((no,), "", _join(negative or about)) if default is True else Option((yes,), "", _about(about, default))
    shown = metavar or _metavar(kind, name.rpartition(".")[2])
    choices = _choices(kind)
    return Option((yes,), shown, _about(about, default), "" if required else _default(default), choices, required)


def _unwrap(hint: Any) -> tuple[Any, Marks]:
    if get_origin(hint) is not Annotated:
        return hint, Marks()
    kind, *found = get_args(hint)
    names = {key: getattr(one, key) for one in found for key in ("name", "metavar") if getattr(one, key, None) is not None}
    return kind, Marks(**names, positional=any(one is tyro.conf.Positional for one in found))


def _metavar(kind: Any, name: str) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if int in inside and tuple[int, int] in inside:
            return "INT [INT]"
        return "|".join(dict.fromkeys(_metavar(one, name) for one in inside if one is not NoneType))
    if origin is Literal:
        return "|".join(map(str, inside))
    if origin is tuple:
        if inside[-1] is Ellipsis:
            return f"{_metavar(inside[0], name)} …"
        return " ".join(_metavar(one, name) for one in inside)
    if kind is bool:
        return "True|False"
    if kind is Path:
        return _WORDS.get(name, "PATH")
    return {int: "INT", float: "FLOAT"}.get(kind) or _WORDS.get(name.replace("-", "_"), "STR")


def _choices(kind: Any) -> tuple[str, ...]:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return tuple(map(str, inside))
    if origin in (Union, UnionType, tuple):
        return tuple(choice for one in inside for choice in _choices(one))
    return ("True", "False") if kind is bool else ()


def _default(value: Any) -> str:
    if value is None or value is inspect.Parameter.empty or value == ():
        return ""
    if isinstance(value, tuple | list):
        return " ".join(map(_default, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _about(text: str, default: Any) -> str:
    """Return a text; where None is the default, what it says about None is the default."""
    joined = _join(text)
    return re.sub(r"(^|(?<=[.;:] ))None: ", "Default: ", joined) if default is None else joined


def argument_texts(docstring: str) -> dict[str, str]:
    """Return what a docstring says of each argument."""
    arguments = inspect.cleandoc(docstring).partition(_ARGUMENTS)[2]
    found = re.split(r"^ {4}(\w+): ", arguments, flags=re.MULTILINE)[1:]
    return {name: _join(text) for name, text in zip(found[::2], found[1::2], strict=True)}


def field_texts(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, also of those it inherits."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, after in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                texts[field.target.id] = str(ast.literal_eval(after.value))
    return texts


def _join(text: str) -> str:
    return " ".join(text.split())


def print_help(name: str, docstring: str, sections: Sequence[Section], *, everything: bool = False) -> None:
    """Print the help of a command: its common options, or everything."""
    hidden = [] if everything else [option for one in sections if not one.common for option in one.options]
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    shown = [one for one in sections if one.common or everything]
    more = f"{len(hidden)} more settings: `vitrail {name} --help-all` lists them."
    say("\n\n".join([help_text(name, docstring, shown, width), *([more] if hidden else [])]))


def help_text(name: str, docstring: str, sections: Sequence[Section], width: int = WIDTH) -> str:
    """Return the help of a command: how it is called, what it does, examples, and every option."""
    about = inspect.cleandoc(docstring).partition(_ARGUMENTS)[0]
    paragraphs = about.split("\n\n")
    examples = [_join(one).removeprefix("Example: ") for one in paragraphs if one.startswith("Example: ")]
    prose = [textwrap.fill(_join(one), width, **_WHOLE) for one in paragraphs if not one.startswith("Example: ")]
    parts = [usage(name, sections, width), *prose]
    if examples:
        parts.append("\n".join(["examples:", *(line for one in examples for line in _example(one, width))]))
    parts += [
        "\n".join([*_title(section.title, width), *_lines(section.options, width)]) for section in sections if section.options
    ]
    return "\n\n".join(parts)


_WHOLE: Mapping[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def usage(name: str, sections: Sequence[Section], width: int = WIDTH) -> str:
    """Return the line that says which words a command takes."""
    options = [option for section in sections for option in section.options]
    words = [
        option.metavar if option.required or "[" in option.metavar else f"[{option.metavar}]"
        for option in options
        if not option.flags
    ]
    words += [f"{option.flags[0]} {option.metavar}" for option in options if option.flags and option.required]
    return textwrap.fill(f"usage: vitrail {' '.join([name, *words])} [OPTIONS]", width, subsequent_indent="  ", **_WHOLE)


def _example(command: str, width: int) -> Iterator[str]:
    """Break a command before an option, as a shell reads it."""
    line = " "
    for word in re.split(r" (?=--)", command):
        if len(line) + len(word) + 3 > width and line.strip():
            yield f"{line} \\"
            line = "     "
        line = f"{line} {word}"
    yield line


def _title(title: str, width: int) -> list[str]:
    return textwrap.wrap(f"{title}:", width, **_WHOLE)


def _lines(options: Sequence[Option], width: int) -> Iterator[str]:
    for option in options:
        head = f"  {', '.join(option.flags)} {option.metavar}".rstrip() if option.flags else f"  {option.metavar}"
        ending = " (required)" if option.required and option.flags else f" (default: {option.default})" if option.default else ""
        texts = textwrap.wrap(option.text + ending, width - _TEXT, **_WHOLE)
        if len(head) > width:  # many choices
            flag, _, rest = head.rpartition(" ")
            pieces = textwrap.wrap(rest.replace("|", "| "), width - 6, **_WHOLE)
            yield flag
            yield from (f"      {one.replace('| ', '|')}" for one in pieces)
        elif len(head) <= _TEXT - 2 and texts:
            yield f"{head:<{_TEXT}}{texts.pop(0)}"
        else:
            yield head
        yield from (" " * _TEXT + one for one in texts)
