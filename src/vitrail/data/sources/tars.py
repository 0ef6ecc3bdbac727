"""`wds:PATTERN`: WebDataset tars, read in any order through an index of byte offsets.

WebDataset itself streams tars and shuffles in a buffer, so that the order of an epoch depends on the number of workers.
With an index, every image is one read, and only the sampler decides the order. The index is made once per tar and
cached. Tars at a URL are read through fsspec.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from glob import glob
from pathlib import Path
from typing import IO, Any

import numpy as np

from vitrail.data.classes import split_name
from vitrail.data.decode import SUFFIXES
from vitrail.data.sources.labels import drop_unused_classes, infer_task, parse_targets
from vitrail.data.sources.read_ahead import ReadAhead, with_retries
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.types import Array, BadImage, PackedStrings, Payload, Split, Task
from vitrail.errors import VitrailError, counted, reason_of
from vitrail.files import cache_folder, write_text
from vitrail.regular_files import parse_json, read_bytes

_INDEX_VERSION = 3  # 1: tars without an end block were accepted; 2: labels in files such as 0001.CLS were not read
_MAX_TARS = 1_000_000
_MAX_BRACES = 100
_MAX_LABEL = 1 << 24
log = logging.getLogger("vitrail.data")


class TarSplit(Split):
    """Images inside tars. Each row of `spans` is (tar number, offset, size)."""

    def __init__(
        self, name: str, task: Task, tars: list[str], keys: list[str], spans: Array, targets: Array, classes: tuple[str, ...]
    ) -> None:
        self.name, self.task, self.targets, self.classes = name, task, targets, classes
        self._tars, self._keys, self._spans = PackedStrings(tars), PackedStrings(keys), spans
        self._remote = any(map(_is_remote, tars))
        self._ahead: ReadAhead | None = None

    def image_name(self, index: int) -> str:
        tar = self._tars[int(self._spans[index, 0])]
        return f"{tar.rpartition('/')[2]}/{self._keys[index]}"

    @property
    def packed_names(self) -> PackedStrings:
        return self._keys

    def read_ahead(self, indices: Array) -> None:
        if not self._remote:
            return
        if self._ahead is None or not self._ahead.usable:
            self._ahead = ReadAhead(_read)
        spans = ((self._tars[number], offset, size) for number, offset, size in self._spans[indices].tolist())
        self._ahead.start(span for span in spans if _is_remote(span[0]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}  # its threads belong to this process

    def payload(self, index: int) -> Payload:
        number, offset, size = self._spans[index].tolist()
        tar = self._tars[number]
        try:
            if _is_remote(tar):
                read = self._ahead.take((tar, offset, size)) if self._ahead is not None and self._ahead.usable else None
                content = read if read is not None else with_retries(_read, tar, offset, size)
            else:
                content = _read(tar, offset, size)
        except OSError as error:
            raise BadImage(f"{tar}: {self._keys[index]}", f"cannot be read ({reason_of(error)})") from error
        if len(content) != size:
            raise BadImage(f"{tar}: {self._keys[index]}", "the tar ends before the image is complete", "Copy the tar again.")
        return content


def open_tars(request: Request) -> OpenResult:
    request.allow_options("train", "val", "test", "label", "image", "task", "classes", "index")
    patterns = {name: request.options[name] for name in ("train", "val", "test") if name in request.options}
    if bool(patterns) == bool(request.location):
        raise VitrailError(
            f"{request.reference}: expected one pattern, as in wds:DIR/train-{{000..146}}.tar, "
            "or one per split, as in wds:?train=PATTERN&val=PATTERN."
        )
    shards = {name: _expand(pattern) for name, pattern in patterns.items()} or _by_name(_expand(request.location))
    splits = {name: _split(name, tars, request) for name, tars in shards.items()}
    return OpenResult(splits=splits, detail=counted(sum(map(len, shards.values())), "tar"))


def _expand(pattern: str) -> list[str]:
    """Return all tars of a pattern with {000..146}, {train,val} and, for local files, *."""
    found = []
    _check_count(pattern)
    for word in _braces(pattern):
        if _is_remote(word):
            found.append(word)
        elif any(sign in word for sign in "*?["):
            found += sorted(glob(str(Path(word).expanduser()), recursive=True))  # noqa: PTH207 - may be absolute
        else:
            found.append(str(Path(word).expanduser()))
    absent = [tar for tar in found if not _is_remote(tar) and not Path(tar).is_file()]
    if absent or not found:
        what = f"{len(absent)} of {counted(len(found), 'tar')} not found, for example {absent[0]}" if absent else "no tars found"
        raise VitrailError(f"wds:{pattern}: {what}. Check the path and the numbers in braces.")
    return found


def _check_count(pattern: str) -> None:
    """Refuse a pattern of too many names before any is made."""
    count, groups = 1, re.findall(r"\{([^{}]*)\}", pattern)
    if len(groups) > _MAX_BRACES:
        raise VitrailError(
            f"wds:{pattern[:80]}…: there are {len(groups):,} pairs of braces; at most {_MAX_BRACES} are accepted. "
            "Use a range, such as {000..146}, or *."
        )
    for inner in groups:
        span = re.fullmatch(r"(\d+)\.\.(\d+)", inner)
        if span and max(len(span[1]), len(span[2])) > 18:
            count = _MAX_TARS + 1
        else:
            count *= max(1, int(span[2]) - int(span[1]) + 1) if span else inner.count(",") + 1
        if count > _MAX_TARS:
            raise VitrailError(
                f"wds:{pattern}: the braces stand for more than {_MAX_TARS:,} names, the most that are accepted. "
                "Check the numbers in braces, or give the tars of one folder as wds:DIR/*.tar."
            )


def _braces(pattern: str) -> list[str]:
    inner = re.search(r"\{([^{}]*)\}", pattern)
    if inner is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", inner[1])
    words = inner[1].split(",")
    if span:
        first, last, width = int(span[1]), int(span[2]), len(span[1])
        if last < first:
            raise VitrailError(f"{inner[0]} in {pattern!r}: the second number must be the larger one.")
        words = [f"{number:0{width}d}" for number in range(first, last + 1)]
    heads = (pattern[: inner.start()] + word + pattern[inner.end() :] for word in words)
    return list(itertools.chain.from_iterable(map(_braces, heads)))


def _by_name(tars: list[str]) -> dict[str, list[str]]:
    """Group tars by the split in their name, as in train-0000.tar and val-0000.tar. Default: train."""
    parts: dict[str, list[str]] = {}
    for tar in tars:
        words = re.split(r"[^a-zA-Z]+", tar.rpartition("/")[2])
        parts.setdefault(next((name for name in map(split_name, words) if name), "train"), []).append(tar)
    return {name: parts[name] for name in ("train", "val", "test") if name in parts}


def _split(name: str, tars: list[str], request: Request) -> Split:
    own = request.options.get("index")
    folder = _cache() if own is None else Path(own).expanduser()
    members = (request.options.get("image"), request.options.get("label"))
    with ThreadPoolExecutor(8) as pool:  # reading from a URL is mostly waiting
        indices = list(pool.map(lambda tar: _index(tar, folder, members, needed=own is not None), tars))
    spans = np.concatenate(
        [np.column_stack([np.full(len(index["spans"]), k), index["spans"]]) for k, index in enumerate(indices)]
    ).astype(np.int64)
    keys, labels = ([text for index in indices for text in index[part]] for part in ("keys", "labels"))
    if not keys:
        raise VitrailError(
            f"{request.reference}: no images in {tars[0]}{' and the others' * (len(tars) > 1)}. "
            "Expected members such as 0001.jpg and 0001.cls; for another extension of images use ?image=EXTENSION."
        )
    if members[1] and not any(label is not None for label in labels):
        raise VitrailError(f"{request.reference}: no image has a label {members[1]!r}. Check ?label=, or remove it.")
    task: Task = "unlabelled"
    if any(label is not None for label in labels) and request.options.get("task") != "unlabelled":
        texts = [["" if label is None else label] for label in labels]
        task = infer_task(texts, request.options.get("task"))
        targets, classes = parse_targets(texts, task, ("label",), lambda row: f"{tars[spans[row, 0]]}: {keys[row]}")
        classes, targets = _with_names(classes, targets, request) if task == "classify" else (classes, targets)
    else:
        targets, classes = np.empty((len(keys), 0), np.float32), ()
    split = TarSplit(name, task, tars, keys, spans, targets, classes)
    return split if "classes" in request.options else drop_unused_classes(split)


def _with_names(numbers: tuple[str, ...], targets: Array, request: Request) -> tuple[tuple[str, ...], Array]:
    """Replace the numbers in .cls files by class names, if ?classes= gives a file (one name per line, or a JSON list)."""
    if "classes" not in request.options:
        return numbers, targets
    file = Path(request.options["classes"]).expanduser()
    try:
        text = read_bytes(file).decode("utf-8-sig")
        names = parse_json(text) if text.lstrip().startswith("[") else text.splitlines()
    except (OSError, ValueError) as error:
        raise VitrailError(
            f"Cannot read the class names from {file}: {reason_of(error)}. Expected one name per line, or a JSON list."
        ) from error
    wrong = [number for number in numbers if not number.isdecimal() or len(number) > 18 or int(number) >= len(names)]
    if wrong:
        raise VitrailError(
            f"{request.reference}: label {wrong[0][:40]!r}, but {file} has {counted(len(names), 'name')}, numbered from 0. "
            "Correct the list of names, or remove ?classes=."
        )
    return tuple(map(str, names)), np.array([int(number) for number in numbers], np.int64)[targets]


def _index(tar: str, folder: Path | None, members: tuple[str | None, str | None], *, needed: bool) -> dict[str, Any]:
    """Return {keys, labels, spans} of one tar, from the folder of indices if the tar has not changed.

    It is kept there; that it cannot be is an error only if it is `needed`.
    """
    state = _state(tar)
    digest = hashlib.sha256(repr((_INDEX_VERSION, tar, state, members)).encode()).hexdigest()[:32]
    file = None if folder is None else folder / f"{digest}.json"
    stored = None if file is None else _stored_index(file, state[0])
    if stored is not None:
        return stored
    keys, labels, spans = [], [], []
    for key, parts in _samples(tar, members[1]).items():
        image = _image_part(parts, members[0])
        if image is not None:
            keys.append(f"{key}.{image}")
            labels.append(_label(parts, members[1], f"{tar}: {key}"))
            spans.append(parts[image][:2])
    try:
        if file is not None:
            write_text(file, json.dumps({"keys": keys, "labels": labels, "spans": spans}))
    except VitrailError as error:
        if needed:
            raise
        _say_not_kept(str(error))
    return {"keys": keys, "labels": labels, "spans": np.array(spans, np.int64).reshape(-1, 2)}


def _cache() -> Path | None:
    try:
        return cache_folder() / "tars"
    except VitrailError as error:
        _say_not_kept(str(error))
        return None


@cache
def _say_not_kept(why: str) -> None:
    log.warning("The index of tar files is not kept, and is made again each time: %s", why)


def _stored_index(file: Path, tar_size: int | None) -> dict[str, Any] | None:
    """Return the index in the cache; None if there is none, if it is not complete, or if it points outside the tar."""
    try:
        stored = json.loads(read_bytes(file))  # not parse_json, whose look at every value takes seconds for millions of images
        keys, labels, spans = stored["keys"], stored["labels"], np.array(stored["spans"], np.int64).reshape(-1, 2)
        sound = all(isinstance(key, str) for key in keys) and all(label is None or isinstance(label, str) for label in labels)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    sound = sound and len(keys) == len(labels) == len(spans) and bool((spans >= 0).all())
    if sound and tar_size is not None:  # a server may not say it
        sound = bool((spans[:, 0] <= tar_size - spans[:, 1]).all())
    return {"keys": keys, "labels": labels, "spans": spans} if sound else None


Part = tuple[int, int, bytes]
"""Offset and size of a tar member and, for a label, its content."""


def _samples(tar: str, label: str | None) -> dict[str, dict[str, Part]]:
    extension = (label or "cls").partition(".")[0].lower()
    samples: dict[str, dict[str, Part]] = {}
    special: list[str] = []
    try:
        with _opened(tar) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, dot, ending = base.partition(".")
                ending = ending.lower()
                plain = member.isfile() and not member.issparse()  # holes of a sparse file are not stored
                if not plain and not member.isdir():
                    special.append(member.name)
                if not plain or not dot or not stem:
                    continue
                text = b""
                if ending in (extension, "json"):
                    if member.size > _MAX_LABEL:
                        raise tarfile.ReadError(f"the label {member.name} has {member.size:,} bytes")
                    text = archive.extractfile(member).read()  # type: ignore[union-attr]
                key = f"{folder}/{stem}" if folder else stem
                samples.setdefault(key, {})[ending] = (member.offset_data, member.size, text)
            file.seek(archive.offset)
            if file.read(512) != bytes(512):  # tarfile ends silently at a wrong header, or where a copy stopped
                raise tarfile.ReadError(f"it has no end block after byte {archive.offset:,}")
    except VitrailError:
        raise
    except Exception as error:  # a corrupted header raises nearly anything: ValueError, OverflowError, KeyError, …
        compressed = tar.endswith((".gz", ".tgz", ".bz2", ".xz", ".zst"))
        advice = (
            "Compressed tars have no random access: decompress it to a plain .tar."
            if compressed
            else "It may be truncated: copy it again."
        )
        raise VitrailError(f"{tar} cannot be read as a tar: {error}. {advice}") from error
    if special:
        members = counted(len(special), "member that is not a regular file", "members that are not regular files")
        log.warning("%s: skipped %s, for example %s.", tar, members, special[0])
    return samples


def _image_part(parts: dict[str, Part], extension: str | None) -> str | None:
    if extension is not None:
        return extension.lower() if extension.lower() in parts else None
    return next((ending for ending in parts if f".{ending}" in SUFFIXES), None)


def _label(parts: dict[str, Part], member: str | None, where: str) -> str | None:
    extension, _, key = (member or "").partition(".")
    extension = extension.lower() or ("cls" if "cls" in parts else "json")
    if extension not in parts:
        return None
    text = parts[extension][2].decode("utf-8", "replace").strip()
    if extension != "json":
        return text
    try:
        content = parse_json(text)
    except ValueError as error:
        raise VitrailError(
            f"{where}.json is not JSON: {error}. Correct it, or choose another label with ?label=EXTENSION."
        ) from error
    value = content.get(key or "label") if isinstance(content, dict) else content
    return None if value is None else "|".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_remote(tar: str) -> bool:
    return "://" in tar


def _file_system(tar: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise VitrailError(f"{tar} is a URL, and reading it needs the `fsspec` package: pip install 'vitrail[web]'.") from error
    try:
        system, path = fsspec.core.url_to_fs(tar)
    except (ValueError, ImportError) as error:
        raise VitrailError(f"{tar} cannot be reached: {str(error).rstrip('.')}. Check the URL.") from error
    return system, path


def _state(tar: str) -> tuple[Any, ...]:
    """Return a value that changes when the tar changes."""
    if not _is_remote(tar):
        status = Path(tar).stat()
        return status.st_size, status.st_mtime_ns
    system, path = _file_system(tar)
    try:
        info = system.info(path)
    except (OSError, ValueError) as error:
        reason = "not found" if isinstance(error, FileNotFoundError) else error
        raise VitrailError(f"{tar} cannot be reached: {reason}. Check the URL and the connection.") from error
    return info.get("size"), str(info.get("ETag") or info.get("LastModified") or info.get("mtime") or "")


@contextmanager
def _opened(tar: str) -> Iterator[IO[bytes]]:
    if _is_remote(tar):
        system, path = _file_system(tar)
        with system.open(path, "rb") as file:
            yield file
    else:
        with Path(tar).open("rb") as file:
            yield file


def _read(tar: str, offset: int, size: int) -> bytes:
    if _is_remote(tar):
        system, path = _file_system(tar)
        content: bytes = system.cat_file(path, start=offset, end=offset + size)
        return content
    with open(tar, "rb") as file:  # noqa: PTH123 - called for every image
        file.seek(offset)
        return file.read(size)
