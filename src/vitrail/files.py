"""Write files and folders atomically, lock them, compute their checksums, and keep dataclasses as rows of a CSV file."""

from __future__ import annotations

import csv
import dataclasses
import errno
import glob
import hashlib
import io
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, get_type_hints

from vitrail.errors import VitrailError
from vitrail.regular_files import open_regular, read_bytes
from vitrail.text import to_bytes, to_csv

log = logging.getLogger("vitrail.files")

T = TypeVar("T")


@contextmanager
def atomic_file(path: str | os.PathLike[str], *, first: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same folder. On success it is synced and renamed to `path`, otherwise deleted.

    With `first`, a file that another process has put there meanwhile stays: of several processes, the first one wins.
    """
    target = Path(path)
    if target.is_dir():
        raise VitrailError(f"{target} is a folder; give the name of a file.")
    _make_folder(target.parent)
    temporary = _new_name(target, target.suffix)
    try:
        with disk_errors(target):
            with _permissions(target.parent):
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
            mode = temporary.stat().st_mode & 0o666
            yield temporary
            temporary.chmod(mode)  # safetensors makes files that only their owner can read
            fsync(temporary)
            with _in_use(target):
                if not (first and _link(temporary, target)):
                    temporary.replace(target)
            fsync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _link(new: Path, target: Path) -> bool:
    """Give a file a second name, unless that is in use. False if the file system has no hard links and the name is free."""
    try:
        os.link(new, target)
    except FileExistsError:
        pass
    except OSError:
        return target.exists()
    return True


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Do the same for a folder. An existing folder of that name is replaced at the end."""
    target = Path(path)
    _make_folder(target.parent)
    restore_folder(target)
    temporary = _new_name(target)
    try:
        with disk_errors(target):
            with _permissions(target.parent):
                temporary.mkdir()
            yield temporary
            for inside in sorted(temporary.rglob("*")):
                if inside.is_file():
                    inside.chmod(temporary.stat().st_mode & 0o666)  # as above
                fsync(inside)
            fsync(temporary)
            with _in_use(target):
                _replace_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(new: Path, target: Path) -> None:
    """Rename a folder to a name that may be in use. If that fails, the old folder is still there; it is deleted only after the
    new name is on the disk."""
    if target.exists():
        old = _new_name(target, ".old")
        target.replace(old)
        try:
            new.replace(target)
        except BaseException:
            old.replace(target)
            raise
    else:
        new.replace(target)
    fsync(target.parent)
    for left in _old_folders(target):  # the one replaced now, and those of processes that were killed
        shutil.rmtree(left, ignore_errors=True)


def restore_folder(target: Path, *, seconds: float = 2.0) -> None:
    """If a process was killed while it replaced this folder, rename the old one back, unless it was renamed less than `seconds`
    ago: then another process may be replacing it now."""
    if os.path.lexists(target):
        return
    try:
        renamed = {old: old.stat().st_ctime for old in _old_folders(target)}
        if renamed and time.time() - max(renamed.values()) >= seconds:
            max(renamed, key=lambda old: renamed[old]).replace(target)
    except OSError:
        return  # another process was faster, or the disk is read-only


def restore_folders(parent: Path) -> None:
    """Do the same for all folders in `parent`, into which only this process writes."""
    for name in {match[1] for path in parent.glob(".*.old") if (match := _OLD.fullmatch(path.name))}:
        restore_folder(parent / name, seconds=0)


_OLD = re.compile(r"\.(.+)\.[0-9a-f]{8}\.old", re.DOTALL)


def _old_folders(target: Path) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}.old"))


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


def cache_folder() -> Path:
    """Return where downloads and indices are kept: $VITRAIL_CACHE, else vitrail in the user's cache folder. The Hub has its own."""
    parts = [given] if (given := os.environ.get("VITRAIL_CACHE")) else [os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vitrail"]
    try:
        return Path(*parts).expanduser()
    except RuntimeError as error:  # a user that the system does not know, as in some containers
        raise VitrailError("There is no home folder to keep files in. Set VITRAIL_CACHE to a writable folder.") from error


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


@contextmanager
def _in_use(target: Path) -> Iterator[None]:
    """Say what a refused rename means: Windows does not replace what is open, and a loaded model maps its weights."""
    try:
        yield
    except PermissionError as error:
        raise VitrailError(
            f"Cannot replace {target}: {error.strerror}. If a program has it open, or has loaded a model from it, close that "
            "first; or choose another name."
        ) from error


def fsync(path: Path) -> None:
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
    with open(open_regular(path), "rb") as file:  # noqa: PTH123 - a descriptor
        return hashlib.file_digest(file, "sha256").hexdigest()


def take_lock(file: Path) -> IO[str] | None:
    """Open a file and lock it until it is closed or this process ends; return None if another process holds the lock.

    Where there are no locks (Windows, some network file systems) the file is only opened.
    """
    while True:
        handle = file.open("a+", encoding="utf-8")
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return handle
        except BlockingIOError:
            handle.close()
            return None
        except OSError as error:
            log.warning("%s cannot be locked (%s): make sure that no other process writes there.", file, error.strerror)
            return handle
        try:
            if os.path.samestat(os.fstat(handle.fileno()), file.stat()):
                return handle
        except FileNotFoundError:
            pass
        handle.close()  # its last owner deleted it between opening and locking


def write_csv(path: Path, kind: type[Any], rows: Iterable[Any]) -> None:
    """Write dataclasses of one kind as the rows of a CSV file, atomically. None becomes empty, a float has six digits."""
    header = [field.name for field in dataclasses.fields(kind)]
    table = to_csv([header, *([_format(value) for value in dataclasses.asdict(row).values()] for row in rows)])
    with atomic_file(path) as temporary:
        temporary.write_bytes(table)


def read_csv(path: Path, kind: type[T], *, optional: Iterable[str] = ()) -> list[T] | None:
    """Read what `write_csv` wrote; None if the columns are not those of `kind`. Columns that were added later are `optional`."""
    hints = get_type_hints(kind)
    reader = csv.DictReader(io.StringIO(read_bytes(path).decode("utf-8", "surrogateescape"), newline=""))
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
