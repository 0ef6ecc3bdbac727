"""The reference of the documentation site, generated from the code: Python names, commands, and configuration fields."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import pkgutil
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any
from unittest import mock

import vitrail
from vitrail.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
HELP_COLUMNS = "100"


def public_packages() -> Iterator[tuple[ModuleType, list[str]]]:
    """Yield each package that lists public names, with these names."""
    yield vitrail, list(vitrail.__all__)
    for found in pkgutil.walk_packages(vitrail.__path__, "vitrail."):
        if not found.ispkg or found.name.startswith("vitrail.commands"):
            continue
        package = importlib.import_module(found.name)
        names = getattr(package, "__all__", None) or (package.__dir__() if "__dir__" in vars(package) else [])
        if names:
            yield package, sorted(names, key=str.lower)


def api() -> str:
    """Return the page of all public names: signature and docstring."""
    parts = [
        "# Python reference",
        "Generated from the code. Names are imported on first use; `import vitrail` alone does not import torch. What is not "
        "listed here is internal and may change.",
    ]
    for package, names in public_packages():
        parts += [f"## {package.__name__}", _prose(package.__doc__)]
        for name in names:
            parts += _member(package, name)
    return "\n\n".join(filter(None, parts)) + "\n"


def _member(package: ModuleType, name: str) -> list[str]:
    value = getattr(package, name)
    title = f"{package.__name__}.{name}"
    heading = f"### {name} {{ #{title} }}"
    if "__" in name:  # which would make the name bold, also within the braces
        heading = f'<a id="{title}"></a>\n\n### `{name}`'
    if inspect.ismodule(value):
        return [heading, f"The package `{value.__name__}`, [below](#{_anchor(value.__name__)})."]
    if inspect.isclass(value):
        return [heading, _code(f"class {title}{_signature(value)}"), _prose(inspect.getdoc(value)), *_methods(value)]
    if inspect.isroutine(value):
        return [heading, _code(f"{title}{_signature(value)}"), _prose(inspect.getdoc(value))]
    return [heading, _code(f"{title} = {_shortened(value)}")]


def _anchor(name: str) -> str:
    return name.replace(".", "")


def _methods(kind: type) -> list[str]:
    rows = []
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(function) and function.__doc__:
            rows.append((f"{name}{_signature(function)}", function.__doc__))
        elif isinstance(function, property) and function.__doc__:
            rows.append((name, function.__doc__))
    if not rows:
        return []
    return ["\n".join(f"- `{_one_line(call)}`: {_one_line(inspect.cleandoc(text))}" for call, text in rows)]


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"<function [\w.<>]*?(\w+)(>+|\.<locals>.*?>) at 0x\w+>", r"\1", text)
    text = re.sub(r" at 0x[0-9a-f]+", "", text).replace("<factory>", "…")
    text = re.sub(r"(: |-> )(['\"])(.*?)\2(?= = |, |\)|$)", r"\1\3", text)  # annotations, which are strings
    if len(text) > 100 and "(" in text:
        parameters = re.split(r", (?=[\w*/]+(?:: |=|,|\)|$))", text[1 : text.rindex(")")])
        text = "(\n    " + ",\n    ".join(parameters) + ",\n" + text[text.rindex(")") :]
    return text


def commands() -> str:
    """Return the page of all commands, each with what `vitrail COMMAND --help` prints."""
    parts = ["# Commands", "Generated: each block is what `vitrail COMMAND --help` prints."]
    for name, (_, summary) in COMMANDS.items():
        parts += [f"## vitrail {name}", summary, f"```text\n{command_help(name)}\n```"]
    return "\n\n".join(parts) + "\n"


def command_help(name: str) -> str:
    """Return the help of a command, as it is printed to a file."""
    stream = io.StringIO()
    with (
        contextlib.redirect_stdout(stream),
        mock.patch.dict(os.environ, {"COLUMNS": HELP_COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}),
        contextlib.suppress(SystemExit),
    ):
        main([*name.split(), "--help"])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    return "\n".join(map(str.rstrip, lines)).strip("\n")


def configurations() -> dict[str, list[type]]:
    """Return the dataclasses of the configuration page, by section."""
    from vitrail.data import Augment, Preprocess
    from vitrail.models import BiTConfig, ResNetConfig, ViTConfig
    from vitrail.train import config

    specs = [
        one
        for one in vars(config).values()
        if inspect.isclass(one) and one.__module__ == config.__name__ and dataclasses.is_dataclass(one)
    ]
    specs.sort(key=lambda one: one is not config.Recipe)
    return {"Recipes": [*specs, Augment], "Models": [ViTConfig, BiTConfig, ResNetConfig], "Preprocessing": [Preprocess]}


def configuration() -> str:
    """Return the page of all fields of recipes, models and preprocessing."""
    parts = [
        "# Configuration",
        "Generated from the dataclasses. Every field of a recipe is an option of `vitrail train` and `vitrail finetune`: "
        "`optim.lr` is `--optim.lr`, and underscores become hyphens. Fields of a model can be passed to `vitrail.create_model` and "
        "`vitrail.load` by name.",
    ]
    for section, kinds in configurations().items():
        parts.append(f"## {section}")
        for kind in kinds:
            rows = [
                f"| `{name}` | {_cell(hint)} | {_cell(default)} | {text} |" for name, hint, default, text in config_fields(kind)
            ]
            table = "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])
            parts += [f"### {kind.__name__}", _prose(inspect.getdoc(kind)), table]
    return "\n\n".join(parts) + "\n"


def config_fields(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and description of the fields of a dataclass."""
    source = dedent(inspect.getsource(kind))
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.ClassDef)
    comments = {token.start[0]: token.string.lstrip("# ") for token in _tokens(source) if token.type == tokenize.COMMENT}
    known = {one.name for one in dataclasses.fields(kind)}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in known):
            continue
        described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        text = after.value.value if described else comments.get(node.end_lineno or 0, "")  # type: ignore[union-attr]
        default = ast.unparse(node.value) if node.value else "required"
        default = re.sub(r"^field\(default_factory=(\w+)\)$", r"\1()", default)
        if not text and default == f"{ast.unparse(node.annotation)}()":
            text = f"Fields below: [{default[:-2]}](#{default[:-2].lower()})"
        yield node.target.id, ast.unparse(node.annotation), default, _one_line(text).replace("|", "\\|")


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def _cell(code: str) -> str:
    return "`" + code.replace("|", "\\|") + "`"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _shortened(value: Any, limit: int = 200) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " …"


def _prose(text: str | None) -> str:
    """Return a docstring as Markdown, with its arguments as a list."""
    about, _, arguments = inspect.cleandoc(text or "").partition("\n\nArgs:\n")
    items = [_one_line(item) for item in re.split(r"\n(?=    \S)", arguments) if item.strip()]
    return about + "".join(f"\n\n{lead}" if not index else f"\n{lead}" for index, lead in enumerate(map(_argument, items)))


def _argument(item: str) -> str:
    name, _, meaning = item.partition(": ")
    return f"- `{name}`: {meaning}"


def errors() -> str:
    """Return the page of error messages: the table of the error tour, which a test holds to the real messages."""
    tour = _tour()
    parts = [
        "# Error messages",
        "Generated from the table of `tests/error_tour/everyday.py`; a test raises each of these errors and compares. A message "
        "says what was found, what was expected and what to do next. Commands print it without a traceback and exit with status "
        "2, or with 1 if they did their work and found problems; in Python it is a `vitrail.VitrailError`.",
    ]
    for topic in dict.fromkeys(case.topic for case in tour.CASES):
        rows = [
            f"| {case.situation}<br>{_cell(case.run)} | {_text(case.found)} | {'<br>'.join(map(_text, case.then))} |"
            for case in tour.CASES
            if case.topic == topic
        ]
        parts += [f"## {topic}", "\n".join(["| what was done | found | expected, and what to do next |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def _text(message: str) -> str:
    """Return a message as the text of a table's cell."""
    return re.sub(r"([|*_<\[\]])", r"\\\1", message)


def _tour() -> ModuleType:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # `tests` is not an installed package
    return importlib.import_module("tests.error_tour.everyday")
