"""The public names with their signatures, as text. `python -m tests.api.surface` writes them down after a deliberate change."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).with_name("surface.txt")
PACKAGES = ("vitrail", *(f"vitrail.{name}" for name in "checkpoints data evaluate export inspect models recipes train".split()))


def public_names(package: str) -> list[str]:
    return sorted(importlib.import_module(package).__all__)


def lines() -> list[str]:
    """Return one line per public name, and per public member of a public class."""
    found: list[str] = []
    for package in PACKAGES:
        for name in public_names(package):
            value = getattr(importlib.import_module(package), name)
            if not isinstance(value, ModuleType):
                found += described(f"{package}.{name}", value)
    return found


def described(path: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        own = any("__init__" in vars(one) for one in value.__mro__ if one.__module__.startswith("vitrail"))
        return [f"class {path}{_signature(value) if own else ''}", *_members(path, value)]
    if callable(value):
        return [f"{path}{_signature(value)}"]
    return [f"{path}: {type(value).__name__}"]


def _members(path: str, kind: type) -> list[str]:
    """Describe the members that Vitrail's own classes define, not those of torch or Python."""
    members: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("vitrail"):
            members |= {name: value for name, value in vars(one).items() if not name.startswith("_")}
    found = []
    for name, value in sorted(members.items()):
        plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if inspect.isfunction(plain):
            found.append(f"{path}.{name}{_signature(plain)}")
        elif not inspect.isclass(plain) and not _is_default(kind, name):
            found.append(f"{path}.{name}")
    return found


def _is_default(kind: type, name: str) -> bool:
    return name in getattr(kind, "__dataclass_fields__", {})  # in the signature of the class already


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r" at 0x[0-9a-f]+", "", text.replace("'", ""))


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
