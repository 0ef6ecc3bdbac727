"""Write files and folders atomically, compute their checksums, and keep dataclasses as rows of a CSV file."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from vitrail.errors import VitrailError

T = TypeVar("T")


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder. On success it is synced and renamed to `path`, otherwise deleted."""
    target = Path(path)
    _make_folder(target.parent)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        _fsync(temporary)
        temporary.replace(target)
        _fsync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Do the same for a folder. An existing folder of that name is replaced at the end."""
    target = Path(path)
    _make_folder(target.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        for file in sorted(temporary.rglob("*")):
            if file.is_file():
                _fsync(file)
        _fsync(temporary)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            target.replace(old / "replaced")
            temporary.replace(target)
            shutil.rmtree(old)
        else:
            temporary.replace(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitrailError(
            f"Cannot write into {folder}: {error.strerror}. Choose another folder, or change its permissions."
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fsync(path: Path) -> None:
    """Flush a file or folder to disk, so that the rename after it cannot be written before its content."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder to fsync it
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_csv(path: Path, kind: type[Any], rows: Iterable[Any]) -> None:
    """Write dataclasses of one kind as the rows of a CSV file, atomically. None becomes empty, a float has six digits."""
    with atomic_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [field.name for field in dataclasses.fields(kind)])
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _format(value) for name, value in dataclasses.asdict(row).items()})


def read_csv(path: Path, kind: type[T], *, optional: Iterable[str] = ()) -> list[T] | None:
    """Read what `write_csv` wrote; None if the columns are not those of `kind`. Columns that were added later are `optional`."""
    hints = get_type_hints(kind)
    with path.open(newline="", encoding="utf-8") as handle:
        reader = csv.DictReader(handle)
        if not hints.keys() - set(optional) <= set(reader.fieldnames or ()) <= hints.keys():
            return None
        return [kind(**{name: _parse(hints[name], text) for name, text in line.items()}) for line in reader]


def _format(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _parse(hint: Any, text: str) -> Any:
    if hint is str:
        return text
    if not text:
        return None
    if hint == bool | None:
        return text == "True"
    return int(text) if hint in (int, int | None) else float(text)
