"""From image files to batches: sources, class maps, preprocessing, augmentation, loaders.

Names are imported on first use, so that importing one module of this package stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.data.augment import Augment as Augment
    from vitrail.data.loader import EvalLoader as EvalLoader
    from vitrail.data.loader import TrainLoader as TrainLoader
    from vitrail.data.preprocess import Preprocess as Preprocess
    from vitrail.data.preprocess import preset as preset
    from vitrail.data.sources import open_source as open_source
    from vitrail.data.types import BadImage as BadImage
    from vitrail.data.types import Source as Source
    from vitrail.data.types import Split as Split

_MODULES = {
    "Augment": "vitrail.data.augment",
    "BadImage": "vitrail.data.types",
    "EvalLoader": "vitrail.data.loader",
    "Preprocess": "vitrail.data.preprocess",
    "Source": "vitrail.data.types",
    "Split": "vitrail.data.types",
    "TrainLoader": "vitrail.data.loader",
    "open_source": "vitrail.data.sources",
    "preset": "vitrail.data.preprocess",
}

__all__ = ["Augment", "BadImage", "EvalLoader", "Preprocess", "Source", "Split", "TrainLoader", "open_source", "preset"]

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
