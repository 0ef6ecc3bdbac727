"""Vitrail: the Vision Transformer paper as working software.

    model = vitrail.create_model("ViT-B/16", outputs=10)

Importing this package is cheap: torch comes in with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail import evaluate, inspect
    from vitrail.checkpoints import load, save
    from vitrail.errors import VitrailError
    from vitrail.models import create_model

# Each public name and the room it comes from; `evaluate` and `inspect` are rooms themselves.
_ROOMS = {
    "VitrailError": "vitrail.errors",
    "create_model": "vitrail.models",
    "evaluate": "vitrail.evaluate",
    "inspect": "vitrail.inspect",
    "load": "vitrail.checkpoints",
    "save": "vitrail.checkpoints",
}

__all__ = ["VitrailError", "create_model", "evaluate", "inspect", "load", "save"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        room = importlib.import_module(_ROOMS[name])
        return room if room.__name__ == f"{__name__}.{name}" else getattr(room, name)
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
