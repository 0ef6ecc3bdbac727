"""What Python users call: load a checkpoint, use it, fine-tune it. The names are public as `vitrail.load` and so on.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.api.bundle import Bundle as Bundle
    from vitrail.api.bundle import load as load
    from vitrail.api.finetuning import finetune as finetune
    from vitrail.api.predictions import PredictionList as PredictionList
    from vitrail.api.run import Records as Records
    from vitrail.api.run import Run as Run
    from vitrail.api.run import open_run as open_run

_MODULES = {
    "Bundle": "vitrail.api.bundle",
    "PredictionList": "vitrail.api.predictions",
    "Records": "vitrail.api.run",
    "Run": "vitrail.api.run",
    "finetune": "vitrail.api.finetuning",
    "load": "vitrail.api.bundle",
    "open_run": "vitrail.api.run",
}

__all__ = ["Bundle", "PredictionList", "Records", "Run", "finetune", "load", "open_run"]

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
