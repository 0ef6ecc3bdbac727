"""Weights in and out: Vitrail's own folders, and everyone else's files in both directions."""

from __future__ import annotations

from vitrail.checkpoints.bundle import Bundle, Prediction
from vitrail.checkpoints.converting import convert, write
from vitrail.checkpoints.formats import FORMATS
from vitrail.checkpoints.loading import load
from vitrail.checkpoints.native import save
from vitrail.checkpoints.report import Report

__all__ = ["FORMATS", "Bundle", "Prediction", "Report", "convert", "load", "save", "write"]
