"""The studies, one file each."""

from __future__ import annotations

import importlib

from vitrail.errors import VitrailError, did_you_mean
from vitrail.study.definition import Study

_FILES = ("data_size", "compute", "shape", "positions", "pooling", "self_supervision", "resolution", "optimizer")
STUDIES: dict[str, Study] = {
    study.name: study for file in _FILES for study in (importlib.import_module(f"vitrail.study.definitions.{file}").STUDY,)
}


def study_named(name: str) -> Study:
    if name not in STUDIES:
        raise VitrailError(f"There is no study {name!r}.{did_you_mean(name, STUDIES)} The studies are {', '.join(STUDIES)}.")
    return STUDIES[name]
