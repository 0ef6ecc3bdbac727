"""The training loop: a `Recipe` into a run folder, resumed exactly, from a laptop to a cluster.

Names are fetched on first use, so that importing one small part of this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.train.callbacks import Callback as Callback
    from vitrail.train.captured_step import CapturedStep as CapturedStep
    from vitrail.train.captured_step import capture as capture
    from vitrail.train.config import Recipe as Recipe
    from vitrail.train.loop import train as train
    from vitrail.train.prepare import Prepared as Prepared
    from vitrail.train.result import Result as Result

_MODULES = {
    "CapturedStep": "vitrail.train.captured_step",
    "Callback": "vitrail.train.callbacks",
    "Prepared": "vitrail.train.prepare",
    "Recipe": "vitrail.train.config",
    "Result": "vitrail.train.result",
    "capture": "vitrail.train.captured_step",
    "train": "vitrail.train.loop",
}

__all__ = ["Callback", "CapturedStep", "Prepared", "Recipe", "Result", "capture", "train"]

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
