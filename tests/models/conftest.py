from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    """Let Triton's interpreter list the members of its own modules once, and not for every call inside a kernel.

    Triton 3.6's also makes numbers of arrays with one axis, which numpy 2.4 refuses.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]

    copied = types.ModuleType("inspect")
    vars(copied).update(vars(inspect))
    copied.getmembers = lambda package: [(name, getattr(package, name)) for name in names(package)]  # type: ignore[attr-defined]
    interpreter.inspect = copied  # type: ignore[attr-defined]

    patch_tensor = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index
