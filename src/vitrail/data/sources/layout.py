"""Looking at a folder, and showing what was found beside what would be understood."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vitrail.data.classes import in_natural_order
from vitrail.data.decode import SUFFIXES
from vitrail.errors import VitrailError

ACCEPTED = """\
  1. split folders            2. one folder, split for you    3. a table, as csv:FILE
     DIR/train/cat/1.jpg         DIR/cat/1.jpg                   path,label,split
     DIR/train/dog/2.jpg         DIR/dog/2.jpg                   a/1.jpg,cat,train
     DIR/val/cat/3.jpg                                           a/2.jpg,dog,val"""


def is_image(name: str) -> bool:
    """Whether a file name ends like an image; hidden files (macOS leaves `._1.jpg` beside `1.jpg`) do not count."""
    return name[0] != "." and name.lower().endswith(SUFFIXES)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders (or links to folders) in a folder, in natural order, hidden ones left out."""
    return list(in_natural_order(entry.name for entry in _entries(folder) if entry.name[0] != "." and _is_folder(entry)))


def images_in(folder: Path) -> list[str]:
    """Names of the image files (or links) lying directly in a folder."""
    return [entry.name for entry in _entries(folder) if is_image(entry.name) and not _is_folder(entry)]


def images_under(folder: Path, prefix: str = "", above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Paths of all images below a folder, relative to it. Links are followed; one that leads back up is not."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    for entry in _entries(folder):
        if _is_folder(entry):
            if entry.name[0] != ".":
                yield from images_under(Path(entry.path), f"{prefix}{entry.name}/", above | {here})
        elif is_image(entry.name):
            yield prefix + entry.name


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise VitrailError(f"Cannot look into {folder}: {error.strerror}. Check its permissions.") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle; it is named when it is read
        return False


def tree(folder: Path, *, depth: int = 3, most: int = 6, indent: str = "  ") -> str:
    """A small drawing of a folder: the first few entries of each level, with counts for the rest."""
    lines = [f"{indent}{folder}/", *_branches(folder, depth, most, indent + "  ")]
    return "\n".join(lines)


def _branches(folder: Path, depth: int, most: int, indent: str) -> list[str]:
    try:
        inner, loose = subfolders(folder), images_in(folder)
        others = [entry.name for entry in _entries(folder) if not _is_folder(entry) and not is_image(entry.name)]
    except VitrailError:
        return [f"{indent}(cannot be looked into)"]
    lines = []
    for name in inner[:most]:
        lines.append(f"{indent}{name}/")
        lines += _branches(folder / name, depth - 1, 3, indent + "  ") if depth > 1 else []
    if len(inner) > most:
        lines.append(f"{indent}… {len(inner) - most} more folders")
    if loose:
        lines.append(f"{indent}{min(loose)}{f' … {len(loose)} images' if len(loose) > 1 else ''}")
    if others:
        lines.append(f"{indent}{min(others)}{f' … {len(others)} other files' if len(others) > 1 else ''}")
    return lines or [f"{indent}(empty)"]
