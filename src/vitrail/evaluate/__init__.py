"""How good a model is, and what it can be used for: accuracy, few-shot, probes, VTAB, predictions, embeddings.

Names are fetched on first use, so that importing one small part of this room stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.evaluate.measuring import Measured as Measured
    from vitrail.evaluate.measuring import measure as measure
    from vitrail.evaluate.ridge import fit_ridge as fit_ridge
    from vitrail.evaluate.ridge import ridge_scores as ridge_scores
    from vitrail.evaluate.running import Running as Running

_HOMES = {
    "Measured": "vitrail.evaluate.measuring",
    "Running": "vitrail.evaluate.running",
    "fit_ridge": "vitrail.evaluate.ridge",
    "measure": "vitrail.evaluate.measuring",
    "ridge_scores": "vitrail.evaluate.ridge",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
