"""Vitrail: the Vision Transformer paper as working software.

    bundle = vitrail.load("ViT-B/16")                 # weights by name, a run, a file
    bundle.predict("photos", top=3)
    run = vitrail.finetune("ViT-B/16", "photos")      # a run: run.bundle, run.metrics, run.curves()
    model = vitrail.create_model("ViT-B/16", outputs=10)

Importing this package is cheap: torch is imported with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail import checkpoints, data, evaluate, export, inspect, models, recipes, train
    from vitrail.api import Bundle, PredictionList, Records, Run, finetune, load, open_run
    from vitrail.checkpoints import Prediction, save
    from vitrail.errors import VitrailError
    from vitrail.models import create_model
    from vitrail.version import __version__

_PACKAGES = ("checkpoints", "data", "evaluate", "export", "inspect", "models", "recipes", "train")
# Each public name and the module it is imported from.
_MODULES = {
    **{name: f"vitrail.{name}" for name in _PACKAGES},
    "__version__": "vitrail.version",
    "Bundle": "vitrail.api",
    "Prediction": "vitrail.checkpoints",
    "PredictionList": "vitrail.api",
    "Records": "vitrail.api",
    "Run": "vitrail.api",
    "VitrailError": "vitrail.errors",
    "create_model": "vitrail.models",
    "finetune": "vitrail.api",
    "load": "vitrail.api",
    "open_run": "vitrail.api",
    "save": "vitrail.checkpoints",
}

__all__ = [
    "Bundle", "Prediction", "PredictionList", "Records", "Run", "VitrailError", "__version__", "checkpoints", "create_model",
    "data", "evaluate", "export", "finetune", "inspect", "load", "models", "open_run", "recipes", "save", "train",
]  # fmt: skip

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
