"""Import the names of a package on first use, so that importing one submodule stays fast."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package (PEP 562).

    `modules` maps each public name to the module that defines it, or to itself where the name is a submodule.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    return get, lambda: sorted(modules)
