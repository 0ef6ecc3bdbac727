"""Read files that others wrote: only regular files, and never more bytes than a limit.

Opening a FIFO for reading waits for a writer, which may never come, and `/dev/zero` has no end. A link or a name in a table
can lead to either.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_BYTES = 1 << 30
"""Larger files are refused by default: no encoded image or description has this size."""
MAX_JSON_DEPTH = 100
"""JSON that is nested more deeply is refused: whatever walks through it, such as `copy.deepcopy`, would exceed Python's stack."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class NotRegular(OSError):
    """A FIFO, socket, device or folder where a regular file is expected, or a file that is too large."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(errno.EINVAL, what, os.fspath(path))


def special_kind(path: str | os.PathLike[str]) -> str | None:
    """Return `a FIFO`, `a socket` or `a … device` if the path, or what it links to, is one; else None."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 - called for every image
    except (OSError, ValueError):
        return None
    return None if kind in (stat.S_IFREG, stat.S_IFDIR) else _KINDS.get(kind, "a special file")


def open_regular(path: str | os.PathLike[str], limit: int | None = None) -> int:
    """Open a regular file for reading, without ever waiting, and return its descriptor; raise `NotRegular` for any other."""
    special = special_kind(path)  # before opening: that alone can rewind a tape or end a writer's wait
    if special is not None:
        raise NotRegular(path, f"{special}, not a regular file")
    handle = os.open(path, _OPEN_FLAGS)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):  # replaced between the two calls
            raise NotRegular(path, f"{_KINDS.get(stat.S_IFMT(status.st_mode), 'a special file')}, not a regular file")
        if limit is not None and status.st_size > limit:
            raise NotRegular(path, f"{status.st_size:,} bytes, more than the limit of {limit:,}")
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_bytes(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    with open(open_regular(path, limit), "rb") as file:
        content = file.read(os.fstat(file.fileno()).st_size + 1)
        while (more := file.read(1 << 20)) and len(content) <= limit:  # it has grown, or its size is not known, as in /proc
            content += more
    if len(content) > limit:
        raise NotRegular(path, f"more than the limit of {limit:,} bytes")
    return content


@contextmanager
def utf8_path(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a path at which a library that accepts only UTF-8 can open this file or folder: on Linux that of its descriptor."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        if not os.path.isdir(_DESCRIPTORS):  # noqa: PTH112 - this module has no Path
            raise
    else:
        yield name
        return
    handle = os.open(path, _OPEN_FLAGS) if os.path.isdir(path) else open_regular(path)  # noqa: PTH112
    try:
        yield f"{_DESCRIPTORS}/{handle}"
    finally:
        os.close(handle)


_DESCRIPTORS = "/proc/self/fd"


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text; a `ValueError` says what is wrong with it."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level, depth = [value], 0
    while level := [part for one in level if isinstance(one, dict | list) for part in _parts(one)]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError("it is nested too deeply")
    return value


def _parts(one: dict[str, Any] | list[Any]) -> list[Any]:
    return [part for part in (one.values() if isinstance(one, dict) else one) if isinstance(part, dict | list)]


def read_json_object(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a regular file; a `ValueError` says why it is not one, an `OSError` why it cannot be read."""
    value = parse_json(read_bytes(path, limit))
    if not isinstance(value, dict):
        raise ValueError(f"it contains a {type(value).__name__}, but a JSON object was expected")
    return value
