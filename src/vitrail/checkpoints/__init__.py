"""Load, save and convert checkpoints: Vitrail's own folders, and the formats of other libraries.

Names are imported on first use, so that importing one small part of this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.checkpoints.bundle import Bundle as Bundle
    from vitrail.checkpoints.bundle import Prediction as Prediction
    from vitrail.checkpoints.conversion import convert as convert
    from vitrail.checkpoints.conversion import write as write
    from vitrail.checkpoints.formats import FORMATS as FORMATS
    from vitrail.checkpoints.loading import load as load
    from vitrail.checkpoints.native import save as save
    from vitrail.checkpoints.report import Report as Report

_MODULES = {
    "Bundle": "vitrail.checkpoints.bundle",
    "FORMATS": "vitrail.checkpoints.formats",
    "Prediction": "vitrail.checkpoints.bundle",
    "Report": "vitrail.checkpoints.report",
    "convert": "vitrail.checkpoints.conversion",
    "load": "vitrail.checkpoints.loading",
    "save": "vitrail.checkpoints.native",
    "write": "vitrail.checkpoints.conversion",
}

__all__ = ["FORMATS", "Bundle", "Prediction", "Report", "convert", "load", "save", "write"]

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
