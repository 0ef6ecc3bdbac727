"""Errors of the files that are in no package: writing files, the command line, notebooks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.error_tour.case import Case, at
from vitrail.files import cache_folder, disk_errors, write_text
from vitrail.notebook import data_frame


def full_disk() -> None:
    with disk_errors("out.npz"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def file_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to replace a file, as Windows does while it is open."""

    def replace(self: Path, target: Any) -> None:
        raise PermissionError(errno.EACCES, "Access is denied")

    monkeypatch.setattr(Path, "replace", replace)


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user that the system does not know, as in some containers."""

    def expanduser(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("VITRAIL_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)


# fmt: off
CASES: tuple[Case, ...] = (
    at("files.py:cache_folder", cache_folder, "There is no home folder to keep files in.",
       "Set VITRAIL_CACHE to a writable folder.", patch=no_home),
    at("files.py:atomic_file", lambda: write_text("empty", "text"), "empty is a folder;", "give the name of a file."),
    at("files.py:disk_errors", full_disk,
       "Cannot write out.npz: No space left on device.", "Free some space, or write to another disk."),
    at("files.py:_permissions", lambda: write_text("notes.txt/new.txt", "text"),
       "Cannot write into notes.txt: File exists.", "Choose another folder, or change its permissions."),
    at("files.py:_in_use", lambda: write_text("new.txt", "text"), "Cannot replace new.txt: Access is denied.",
       "If a program has it open, or has loaded a model from it, close that first; or choose another name.", patch=file_in_use),
    at("notebook.py:data_frame", lambda: data_frame({}), "to_pandas() needs pandas, which is not installed:",
       "pip install pandas.", hidden="pandas"),
)
# fmt: on
