"""Models for other runtimes: ONNX files and torch.export programs, each compared with the PyTorch model before it is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.export.artefact import Artefact as Artefact
    from vitrail.export.settings import ExportSettings as ExportSettings
    from vitrail.export.verify import Comparison as Comparison
    from vitrail.export.verify import compare as compare
    from vitrail.export.write import export_model as export_model

_MODULES = {
    "Artefact": "vitrail.export.artefact",
    "Comparison": "vitrail.export.verify",
    "ExportSettings": "vitrail.export.settings",
    "compare": "vitrail.export.verify",
    "export_model": "vitrail.export.write",
}

__all__ = ["Artefact", "Comparison", "ExportSettings", "compare", "export_model"]

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
