"""List the images of a folder, and draw its tree for error messages."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from vitrail.data.classes import natural_sort
from vitrail.data.decode import SUFFIXES
from vitrail.data.types import BadImage
from vitrail.errors import VitrailError, counted
from vitrail.regular_files import special_kind

log = logging.getLogger("vitrail.data")
UNREAD_PHOTOS = (".heic", ".heif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".psd")
"""Photos that Pillow does not read: skipped in folders, with a warning."""

ACCEPTED = """\
  1. split folders            2. class folders only           3. a table, as csv:FILE
     DIR/train/cat/1.jpg         DIR/cat/1.jpg                   path,label,split
     DIR/train/dog/2.jpg         DIR/dog/2.jpg                   a/1.jpg,cat,train
     DIR/val/cat/3.jpg                                           a/2.jpg,dog,val"""


def is_image(name: str) -> bool:
    """Whether a file name has an image suffix. Hidden files (macOS writes `._1.jpg` next to `1.jpg`) do not count."""
    return name[0] != "." and name.lower().endswith(SUFFIXES)


def is_unread_photo(name: str) -> bool:
    """Whether a file name has the suffix of a photo that Pillow does not read."""
    return name[0] != "." and name.lower().endswith(UNREAD_PHOTOS)


def subfolders(folder: Path) -> list[str]:
    """Return the names of subfolders (or links to folders) in natural order, without hidden ones."""
    return list(natural_sort(entry.name for entry in _entries(folder) if entry.name[0] != "." and _is_folder(entry)))


def images_in(folder: Path) -> list[str]:
    """Return the names of the image files (or links) directly in a folder."""
    return [entry.name for entry in _entries(folder) if is_image(entry.name) and not _is_folder(entry)]


def images_under(
    folder: Path,
    prefix: str = "",
    parents: frozenset[tuple[int, int]] = frozenset(),
    *,
    special: list[BadImage] | None = None,
) -> Iterator[str]:
    """Yield the paths of all images below a folder, relative to it. Links are followed, except to a parent folder.

    FIFOs, sockets, devices and links to them are added to `special` instead, and photos of formats that are not read. Without
    it they are yielded, and reading them raises `BadImage`.
    """
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in parents:
        return
    for entry in _entries(folder):
        if _is_folder(entry):
            if entry.name[0] != "." and not _leads_up(entry):
                yield from images_under(Path(entry.path), f"{prefix}{entry.name}/", parents | {here}, special=special)
        elif is_image(entry.name):
            kind = _special_kind(entry) if special is not None else None
            if special is not None and kind is not None:
                special.append(BadImage(entry.path, f"{kind}, not a regular file", kind="special-file"))
            else:
                yield prefix + entry.name
        elif special is not None and is_unread_photo(entry.name):
            reason = f"{Path(entry.name).suffix[1:].upper()} photos are not read; convert it to JPEG or PNG"
            special.append(BadImage(entry.path, reason, kind="unread-format"))


def warn_of_skipped(folder: str | Path, skipped: list[BadImage]) -> None:
    """Say how many files were skipped because they are not regular files, or of a format that is not read."""
    kinds = {
        "special-file": ("file that is not a regular file", "files that are not regular files"),
        "unread-format": ("photo of a format that is not read", "photos of formats that are not read"),
    }
    for kind, words in kinds.items():
        those = [one for one in skipped if one.kind == kind]
        if those:
            log.warning("%s: skipped %s, for example %s (%s).", folder, counted(len(those), *words), those[0].name, those[0].reason)


def stray_files(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield the paths of files below a folder that are not images and so are not used. Hidden files do not count."""
    for entry in _entries(folder):
        if entry.name[0] == "." or entry.name in _SYSTEM_FILES:
            continue
        if _is_folder(entry):
            if not entry.is_symlink():  # it could lead to a parent folder
                yield from stray_files(Path(entry.path), f"{prefix}{entry.name}/")
        elif not is_image(entry.name):
            yield prefix + entry.name


_SYSTEM_FILES = ("Thumbs.db", "desktop.ini")  # written by Windows


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise VitrailError(f"Cannot list {folder}: {error.strerror}. Check the path and its permissions.") from error


def _leads_up(entry: os.DirEntry[str]) -> bool:
    """Whether it is a link to a folder that it lies in, whose images would be found again, of all classes."""
    if not entry.is_symlink():
        return False
    target, here = os.path.realpath(entry.path), os.path.realpath(os.path.dirname(entry.path))  # noqa: PTH120 - no Path needed
    return here == target or here.startswith(target.rstrip("/") + "/")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link; the error is raised when it is read
        return False


def _special_kind(entry: os.DirEntry[str]) -> str | None:
    try:
        if entry.is_file():  # known from the listing, without another system call
            return None
    except OSError:
        return None
    return special_kind(entry.path)


def tree(folder: Path, *, depth: int = 3, limit: int = 6, indent: str = "  ") -> str:
    """Draw the tree of a folder: the first entries of each level, and the number of the others."""
    lines = [f"{indent}{folder}/", *_branches(folder, depth, limit, indent + "  ")]
    return "\n".join(lines)


def _branches(folder: Path, depth: int, limit: int, indent: str) -> list[str]:
    try:
        inner, loose = subfolders(folder), images_in(folder)
        others = [entry.name for entry in _entries(folder) if not _is_folder(entry) and not is_image(entry.name)]
    except VitrailError:
        return [f"{indent}(cannot be listed)"]
    lines = []
    for name in inner[:limit]:
        lines.append(f"{indent}{name}/")
        lines += _branches(folder / name, depth - 1, 3, indent + "  ") if depth > 1 else []
    if len(inner) > limit:
        lines.append(f"{indent}… {counted(len(inner) - limit, 'more folder')}")
    if loose:
        lines.append(f"{indent}{min(loose)}{f' … {len(loose)} images' if len(loose) > 1 else ''}")
    if others:
        lines.append(f"{indent}{min(others)}{f' … {len(others)} other files' if len(others) > 1 else ''}")
    return lines or [f"{indent}(empty)"]
