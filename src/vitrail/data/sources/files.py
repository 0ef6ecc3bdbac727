"""Images stored as single files; used for folders and for tables of paths."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from vitrail.data.types import Array, BadImage, PackedStrings, Payload, Split, Task
from vitrail.regular_files import NotRegular, read_bytes


class FileSplit(Split):
    """A split whose images are files; their names are absolute paths or relative to `root`."""

    def __init__(self, name: str, task: Task, root: Path, files: Iterable[str], targets: Array, classes: tuple[str, ...]) -> None:
        self.name, self.task, self.root, self.targets, self.classes = name, task, str(root), targets, classes
        self._files = PackedStrings(files)

    def image_name(self, index: int) -> str:
        return self._files[index]

    def path(self, index: int) -> str:
        return os.path.join(self.root, self._files[index])  # noqa: PTH118 - creating a Path takes longer than a small read

    @property
    def packed_names(self) -> PackedStrings:
        return self._files

    def payload(self, index: int) -> Payload:
        path = self.path(index)
        try:
            return read_bytes(path)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise BadImage(path, _read_error(path, error)) from error


def _read_error(path: str, error: OSError | ValueError) -> str:
    if isinstance(error, NotRegular):
        return str(error.strerror)
    if isinstance(error, ValueError):
        return f"cannot be read ({error})"
    if error.errno in (errno.ENOENT, errno.ELOOP) and Path(path).is_symlink():  # in this order: a long name raises there
        kind = "a circular link" if error.errno == errno.ELOOP else "a broken link"
        return f"{kind} to {Path(path).readlink()}"
    return "no such file" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"
