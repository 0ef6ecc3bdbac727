"""Download one file: resumed after an interruption, verified, and in place only when it is complete."""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Protocol

from vitrail.errors import VitrailError
from vitrail.files import disk_errors

TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 5  # in a row without a byte
PAUSE = 1.0
_CHUNK = 1 << 20


class Progress(Protocol):
    """Called with the file's name, the bytes that are there, and the size of the file or None."""

    def __call__(self, name: str, done: int, total: int | None) -> None: ...


@dataclass(frozen=True)
class Checksum:
    """What a file must have: `sha256` or `md5`, in hexadecimal digits."""

    algorithm: str
    digits: str


def cache_folder() -> Path:
    """Return where files that are not on the Hub are kept: $VITRAIL_CACHE, else vitrail in the user's cache folder."""
    if given := os.environ.get("VITRAIL_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitrail"


def cached_url(url: str) -> Path:
    """Return where the file of a URL is kept."""
    host, _, path = url.partition("://")[2].partition("/")
    safe = [part for part in f"{host}/{path}".replace(":", "_").split("/") if part not in ("", ".", "..")]
    return cache_folder().joinpath("weights", *safe)


def fetch(
    url: str,
    target: Path,
    *,
    checksum: Checksum | None = None,
    size: int | None = None,
    headers: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download a URL to a file; returns it at once if it is there.

    Bytes are written to `NAME.part`, which a later call continues if the file on the server is still the same one. Without a
    checksum, the MD5 that Google's storage sends is used; a server without either is trusted for the size only.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    show = progress or _quiet
    with disk_errors(target), _locked(part):
        if target.exists():  # another process has downloaded it meanwhile
            return target
        if checksum is None and not _version(part):
            part.unlink(missing_ok=True)  # nothing would show that the file on the server has changed
        found = _receive(url, part, headers or {}, size, show, target.name)
        expected = checksum or found.checksum
        if expected is not None and _digits(part, expected.algorithm) != expected.digits:
            part.unlink(missing_ok=True)
            raise VitrailError(
                f"The download of {url} is corrupted: its {expected.algorithm.upper()} is not {expected.digits}. It was deleted; "
                "run again to download it anew."
            )
        part.replace(target)
        _state_file(part).unlink(missing_ok=True)
    return target


@dataclass
class _Response:
    """What the server says about a file."""

    total: int | None = None
    version: str = ""  # ETag, or else the date: a changed file must not be continued
    checksum: Checksum | None = None


def _receive(url: str, part: Path, headers: dict[str, str], size: int | None, show: Progress, name: str) -> _Response:
    """Write the whole file to `part`. Interruptions are resumed, as long as bytes arrive."""
    failures, last = 0, ""
    while failures < ATTEMPTS:
        before = _length(part)
        try:
            found = _request(url, part, headers, size, show, name)
            if found.total is None or _length(part) == found.total:
                return found
            last = f"the connection ended after {_length(part):,} of {found.total:,} bytes"
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is longer than the file: it is of another one
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                reason = {401: "it needs a login", 403: "access is denied", 404: "there is no such file"}.get(
                    error.code, error.reason
                )
                raise VitrailError(f"Cannot download {url}: {reason} (HTTP {error.code}).") from error
            last = f"HTTP {error.code}"
        except (OSError, http.client.HTTPException) as error:
            last = str(getattr(error, "reason", None) or error or type(error).__name__)
        failures = 0 if _length(part) > before else failures + 1
        if failures < ATTEMPTS:
            time.sleep(PAUSE)
    done = f" {_length(part):,} bytes are kept in {part}: run again to resume." if _length(part) else ""
    raise VitrailError(f"Cannot download {url}: {last}.{done}")


def _request(url: str, part: Path, headers: dict[str, str], size: int | None, show: Progress, name: str) -> _Response:
    start = _length(part)
    asked = {"Accept-Encoding": "identity", "User-Agent": "vitrail", **headers}
    if start:
        asked["Range"] = f"bytes={start}-"
        if version := _version(part):
            asked["If-Range"] = version
    with urllib.request.urlopen(urllib.request.Request(url, headers=asked), timeout=TIMEOUT) as response:
        continued = response.status == 206
        found = _describe(response.headers, start if continued else 0)
        if size is not None and found.total is not None and found.total != size:
            raise VitrailError(f"{url} has {found.total:,} bytes; {size:,} are expected. Nothing was stored; run again.")
        _state_file(part).write_text(found.version, encoding="utf-8")
        done = start if continued else 0
        _check_space(part, (found.total or 0) - done)
        with part.open("ab" if continued else "wb") as file:
            show(name, done, found.total)
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                show(name, done, found.total)
    return found


def _describe(headers: Message, start: int) -> _Response:
    length = headers.get("Content-Length")
    total = start + int(length) if length and length.isdigit() else None
    if (whole := (headers.get("Content-Range") or "").rpartition("/")[2]).isdigit():
        total = int(whole)
    md5 = next((one.strip()[4:] for line in headers.get_all("x-goog-hash", []) for one in line.split(",") if "md5=" in one), None)
    checksum = Checksum("md5", base64.b64decode(md5).hex()) if md5 else None
    # A weak ETag cannot be used with If-Range.
    version = headers.get("ETag") or headers.get("Last-Modified") or ""
    return _Response(total, "" if version.startswith("W/") else version, checksum)


def _check_space(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise VitrailError(
            f"{part.parent} has {free / 1e9:.1f} GB of free space; the download needs {needed / 1e9:.1f} GB. Free some space, or "
            "set HF_HOME (weights from the Hub) or VITRAIL_CACHE (other files) to a folder on another disk."
        )


def _digits(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _length(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _state_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _version(part: Path) -> str:
    """Return which version of the file on the server the bytes are of."""
    return _state_file(part).read_text(encoding="utf-8") if _state_file(part).exists() else ""


def _quiet(name: str, done: int, total: int | None) -> None:
    pass


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Let one process at a time write a part: the ranks of a run all ask for the same weights."""
    from huggingface_hub.utils._fixes import WeakFileLock

    lock = cache_folder() / "locks" / f"{hashlib.sha256(os.fsencode(part.absolute())).hexdigest()[:32]}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        yield
