"""Write files and folders atomically, compute their checksums, and keep dataclasses as rows of a CSV file."""

from __future__ import annotations

import csv
import dataclasses
import errno
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from vitrail.errors import VitrailError
from vitrail.text import to_bytes

T = TypeVar("T")


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder. On success it is synced and renamed to `path`, otherwise deleted."""
    target = Path(path)
    _make_folder(target.parent)
    temporary = _new_name(target, target.suffix)
    try:
        with disk_errors(target):
            with _permissions(target.parent):
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
            yield temporary
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
    temporary = _new_name(target)
    try:
        with disk_errors(target):
            with _permissions(target.parent):
                temporary.mkdir()
            yield temporary
            for file in sorted(temporary.rglob("*")):
                if file.is_file():
                    file.chmod(temporary.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
                    _fsync(file)
            _fsync(temporary)
            _replace_folder(temporary, target)
            _fsync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(new: Path, target: Path) -> None:
    """Rename a folder to a name that may be in use. If that fails, the old folder is still there."""
    if not target.exists():
        new.replace(target)
        return
    old = _new_name(target, ".old")
    target.replace(old)
    try:
        new.replace(target)
    except BaseException:
        old.replace(target)
        raise
    shutil.rmtree(old)


def _new_name(target: Path, suffix: str = "") -> Path:
    """Return a hidden, unused name next to `target`. Unlike `tempfile`'s files, what is created there has the mode that the
    umask gives: reading the umask would change it for all threads."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{suffix}")


# Errors of writing only: the disk is full, over quota, over the limit of a file's size, or read-only.
_DISK_ERRORS = frozenset(
    number
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS")
    if (number := getattr(errno, name, None)) is not None  # Windows has no quota
)


class DiskError(VitrailError):
    """A file could not be written because of the disk: it is full, over quota or read-only."""


@contextmanager
def disk_errors(target: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors of the disk in the block as a `DiskError` that names `target`, whatever a library wrapped them in."""
    try:
        yield
    except (DiskError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        reason = disk_reason(error, Path(target))
        if not reason:
            raise
        raise DiskError(f"Cannot write {target}: {reason}. Free some space, or write to another disk.") from error


def disk_reason(error: BaseException, target: Path | None = None) -> str:
    """Return what the system says about the disk, if that is the cause of `error`; otherwise an empty string."""
    for one in _causes(error):
        if isinstance(one, OSError) and one.errno is not None:
            return os.strerror(one.errno) if one.errno in _DISK_ERRORS else ""
        code = re.search(r"\(os error (\d+)\)", str(one))  # safetensors, and other libraries in Rust
        if code and int(code[1]) in _DISK_ERRORS:
            return os.strerror(int(code[1]))
    # numpy and torch.save do not say why they could not write.
    vague = any(isinstance(one, (OSError, RuntimeError)) for one in _causes(error))
    return os.strerror(errno.ENOSPC) if vague and target is not None and _is_full(target.parent) else ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        failures = getattr(error, "failures", None)  # of each rank, of torch's CheckpointException
        error = next(iter(failures.values()))[0] if failures else error.__cause__ or error.__context__


def _is_full(folder: Path) -> bool:
    """Tell whether a block of the disk's can still be written to a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return (file.write(bytes(1 << 16)) or 0) < 1 << 16
    except OSError as error:
        return error.errno in _DISK_ERRORS


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file atomically. Names that are not UTF-8 keep their bytes."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(to_bytes(text))


def _make_folder(folder: Path) -> None:
    with disk_errors(folder), _permissions(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _permissions(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if disk_reason(error):
            raise
        raise VitrailError(
            f"Cannot write into {folder}: {error.strerror}. Choose another folder, or change its permissions."
        ) from error


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
