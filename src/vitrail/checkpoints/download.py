"""Download one file: resumed after an interruption, verified, and in place only when it is complete."""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import os
import posixpath
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from vitrail.errors import VitrailError, reason_of
from vitrail.files import cache_folder, disk_errors

TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 5  # in a row without a byte
PAUSE = 1.0
NOT_FOUND = (404, 410)  # answers that another machine would get, too
_CHUNK = 1 << 20
_PRIVATE = ("authorization", "cookie")
_URL = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")  # s3:// and ssh:// have logins, too


class Progress(Protocol):
    """Called with the file's name, the bytes that are there, and the size of the file or None."""

    def __call__(self, name: str, done: int, total: int | None) -> None: ...


@dataclass(frozen=True)
class Checksum:
    """What a file must have: `sha256` or `md5`, in hexadecimal digits."""

    algorithm: str
    digits: str


def is_url(reference: str) -> bool:
    return reference.startswith(("https://", "http://"))


def cached_url(url: str) -> Path:
    """Return where the file of a URL is kept: by scheme, host, path and query. A login in the URL is not part of it."""
    parts = urlsplit(url)
    path = posixpath.normpath(f"/{parts.path}").replace(":", "%3A").replace("\\", "%5C")
    *folders, name = [part for part in path.split("/") if part] or ["index"]
    if parts.query:
        stem, dot, suffix = name.rpartition(".")
        digits = hashlib.sha256(parts.query.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        name = f"{stem or suffix}-{digits}{dot if stem else ''}{suffix if stem else ''}"
    return cache_folder().joinpath("weights", parts.scheme, _host(url).replace(":", "_"), *folders, name)


def shown_url(url: str) -> str:
    """Return a URL for messages and files: without a login, and without its query, which may be a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{_host(url)}{parts.path}{'?…' if parts.query else ''}"


def hide_secrets(text: str) -> str:
    """Replace each URL in the message of another library by `shown_url` of it."""
    return _URL.sub(lambda found: shown_url(found[0]), text)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, without secrets."""
    return hide_secrets(str(error).splitlines()[0]).rstrip(".") if str(error) else type(error).__name__


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2].casefold()


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
    part = target.with_name(f"{target.name}.part")
    show = progress or _quiet
    with _write_errors(target), _locked(part):
        if target.exists():  # another process has downloaded it meanwhile
            return target
        if checksum is None and not _version(part):
            part.unlink(missing_ok=True)  # nothing would show that the file on the server has changed
        found = _receive(url, part, headers or {}, size, show, target.name)
        expected = checksum or found.checksum
        if expected is not None and _digits(part, expected.algorithm) != expected.digits:
            part.unlink(missing_ok=True)
            raise VitrailError(
                f"The download of {shown_url(url)} is corrupted: its {expected.algorithm.upper()} is not {expected.digits}. It was "
                "deleted; run again to download it anew."
            )
        with part.open("rb+") as file:  # else a power failure could leave an empty file under the final name
            os.fsync(file.fileno())
        part.replace(target)
        _state_file(part).unlink(missing_ok=True)
        with suppress(OSError):  # Windows does not delete open files. A process that waits for the lock finds the target.
            _lock_file(part).unlink()
    return target


@dataclass
class _Response:
    """What the server says about a file."""

    total: int | None = None
    version: str = ""  # ETag, or else the date: a changed file must not be continued
    checksum: Checksum | None = None


class _Interrupted(Exception):
    """The network failed, or sent something else than asked for: worth another attempt, unlike an error of the disk."""


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
                advice = " Check the URL." if error.code in NOT_FOUND else ""
                raise VitrailError(f"Cannot download {shown_url(url)}: {reason} (HTTP {error.code}).{advice}") from error
            last = f"HTTP {error.code}"
        except _Interrupted as error:
            last = str(error)
        failures = 0 if _length(part) > before else failures + 1
        if failures < ATTEMPTS:
            time.sleep(PAUSE)
    done = f" {_length(part):,} bytes are kept in {part}: run again to resume." if _length(part) else ""
    raise VitrailError(f"Cannot download {shown_url(url)}: {last}.{done}")


def _request(url: str, part: Path, headers: dict[str, str], size: int | None, show: Progress, name: str) -> _Response:
    start = _length(part)
    asked = {"Accept-Encoding": "identity", "User-Agent": "vitrail", **headers}
    if start:
        asked["Range"] = f"bytes={start}-"
        if version := _version(part):
            asked["If-Range"] = version
    with _open(url, asked) as response:
        continued = response.status == 206
        found = _describe(response.headers, start if continued else 0)
        if size is not None and found.total is not None and found.total != size:
            raise VitrailError(f"{shown_url(url)} has {found.total:,} bytes; {size:,} are expected. Nothing was stored; run again.")
        if continued and not _continues(response.headers, start, found.version, _version(part)):
            part.unlink(missing_ok=True)
            raise _Interrupted("the server sent another part of the file, or of another version, than asked for")
        if not continued:  # before the version is stored: old bytes must never count as the new version
            part.write_bytes(b"")
        _state_file(part).write_text(found.version, encoding="utf-8")
        done = start if continued else 0
        _check_space(part, (found.total or 0) - done)
        with part.open("ab") as file:
            show(name, done, found.total)
            while chunk := _read(response):
                file.write(chunk)
                done += len(chunk)
                show(name, done, found.total)
    return found


def _open(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Send a request. Logins are for the host of the URL only: a redirect elsewhere does not get them."""
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host, fragment="").geturl())
    if at:
        headers = {"Authorization": f"Basic {base64.b64encode(unquote(login).encode()).decode()}", **headers}
    for key, value in headers.items():
        (request.add_unredirected_header if key.casefold() in _PRIVATE else request.add_header)(key, value)
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Interrupted(_reason(error)) from error
    return response


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(_reason(error)) from error


def _reason(error: Exception) -> str:
    return hide_secrets(str(getattr(error, "reason", None) or error or type(error).__name__))


def _continues(headers: Message, start: int, version: str, stored: str) -> bool:
    """Tell whether the bytes of an answer follow those that are there. Not every server honours If-Range."""
    begins = re.match(r"bytes (\d+)-", headers.get("Content-Range") or "")
    return begins is not None and int(begins[1]) == start and (not version or not stored or version == stored)


def _describe(headers: Message, start: int) -> _Response:
    length = headers.get("Content-Length")
    total = start + int(length) if length and length.isdigit() else None
    if (whole := (headers.get("Content-Range") or "").rpartition("/")[2]).isdigit():
        total = int(whole)
    hashes = [one.strip() for line in headers.get_all("x-goog-hash", []) for one in line.split(",")]
    checksum = next((_md5(one.removeprefix("md5=")) for one in hashes if one.startswith("md5=")), None)
    # A weak ETag cannot be used with If-Range.
    version = headers.get("ETag") or headers.get("Last-Modified") or ""
    return _Response(total, "" if version.startswith("W/") else version, checksum)


def _md5(text: str) -> Checksum | None:
    try:
        digest = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return Checksum("md5", digest.hex()) if len(digest) == 16 else None


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
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    part.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(_lock_file(part)):
        yield


def _lock_file(part: Path) -> Path:
    """Next to the part, so that everyone who shares the folder has the same lock."""
    return part.with_name(f"{part.name}.lock")


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Raise errors of writing as sentences; those of the network are `_Interrupted`."""
    try:
        with disk_errors(target):
            yield
    except OSError as error:
        raise VitrailError(f"Cannot write {target}: {reason_of(error)}. Check the permissions of its folder.") from error
