"""The paper in small: its studies, repeated at any size of models and data.

Names are imported on first use, so importing one small part of this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.study.definitions import STUDIES as STUDIES
    from vitrail.study.report import write_outputs as write_outputs
    from vitrail.study.session import StudyResult as StudyResult
    from vitrail.study.session import run_study as run_study
    from vitrail.study.settings import StudySettings as StudySettings

_MODULES = {
    "STUDIES": "vitrail.study.definitions",
    "StudyResult": "vitrail.study.session",
    "StudySettings": "vitrail.study.settings",
    "run_study": "vitrail.study.session",
    "write_outputs": "vitrail.study.report",
}

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
