"""Load, save and convert checkpoints: Vitrail's own folders, and the formats of other libraries."""

from __future__ import annotations

from vitrail.checkpoints.bundle import Bundle, Prediction
from vitrail.checkpoints.conversion import convert, write
from vitrail.checkpoints.formats import FORMATS
from vitrail.checkpoints.loading import load
from vitrail.checkpoints.native import save
from vitrail.checkpoints.report import Report

__all__ = ["FORMATS", "Bundle", "Prediction", "Report", "convert", "load", "save", "write"]
