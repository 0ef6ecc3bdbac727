"""All places in the code that make an error for the user, found in the syntax trees."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import pytest

import vitrail
from vitrail.errors import VitrailError
from vitrail.serve.errors import ServiceError

ROOT = Path(vitrail.__file__).parent
ERRORS = {"VitrailError", "ServiceError", "StoppedBySignal", "MissingData", "DiskError", "AmbiguousName", "BadImage", "Diverged"}


@dataclass(frozen=True)
class Site:
    """One call that makes an error."""

    name: str
    """`data/split.py:split_rows`, with `#2` for the second of several in one function."""
    first: int
    last: int
    message: str
    """The message with {} for each value, or the expression that is the message."""

    @property
    def package(self) -> str:
        """The package or file directly below `vitrail`."""
        return self.name.split("/")[0].split(":")[0]


@cache
def raise_sites() -> dict[str, Site]:
    """Return every place that makes an error for the user, by name."""
    found: dict[str, Site] = {}
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if any(name in text for name in ERRORS):
            by_function: dict[str, list[ast.Call]] = {}
            for function, call in _calls(ast.parse(text), ()):
                by_function.setdefault(function, []).append(call)
            for function, calls in by_function.items():
                for number, call in enumerate(calls, start=1):
                    name = f"{file.relative_to(ROOT).as_posix()}:{function}" + (f"#{number}" if len(calls) > 1 else "")
                    found[name] = Site(name, call.lineno, call.end_lineno or call.lineno, _template(call))
    return found


def _calls(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _calls(child, (*inside, child.name))
        else:
            if isinstance(child, ast.Call) and getattr(child.func, "id", getattr(child.func, "attr", "")) in ERRORS:
                yield ".".join(inside), child
            yield from _calls(child, inside)


def _template(call: ast.Call) -> str:
    for argument in call.args:
        strings = [part for part in ast.walk(argument) if isinstance(part, ast.JoinedStr | ast.Constant)]
        if strings:
            parts = strings[0].values if isinstance(strings[0], ast.JoinedStr) else [strings[0]]
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
    return ast.unparse(call)


def record(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that gets the name of each site that makes an error from now on."""
    made: set[str] = set()
    for error in (VitrailError, ServiceError):
        original = error.__init__

        def init(self: Exception, *args: object, _original: object = original, **kwargs: object) -> None:
            site = _site(sys._getframe(1))
            if site:
                made.add(site)
            _original(self, *args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(error, "__init__", init)
    return made


def _site(frame: FrameType | None) -> str | None:
    while frame and frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), Exception):
        frame = frame.f_back  # a subclass with an __init__ of its own
    if frame is None:
        return None
    file = Path(frame.f_code.co_filename)
    if ROOT not in file.parents:
        return None
    start = file.relative_to(ROOT).as_posix() + ":"
    for site in raise_sites().values():
        if site.name.startswith(start) and site.first <= frame.f_lineno <= site.last:
            return site.name
    return None
