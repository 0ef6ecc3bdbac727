"""Vitrail: the Vision Transformer paper as working software.

    model = vitrail.create_model("ViT-B/16", outputs=10)

Importing this package is cheap: torch is imported with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail import evaluate, inspect
    from vitrail.checkpoints import load, save
    from vitrail.errors import VitrailError
    from vitrail.models import create_model

# Each public name and the module it is imported from; `evaluate` and `inspect` are packages themselves.
_MODULES = {
    "VitrailError": "vitrail.errors",
    "create_model": "vitrail.models",
    "evaluate": "vitrail.evaluate",
    "inspect": "vitrail.inspect",
    "load": "vitrail.checkpoints",
    "save": "vitrail.checkpoints",
}

__all__ = ["VitrailError", "create_model", "evaluate", "inspect", "load", "save"]

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
