"""`packed:DIR`: what `vitrail data pack` wrote, mapped into memory and read without decoding anything.

A packed set is a folder:

    packed.json              what it is: classes, task, settings, and for every file its size and checksums
    train.images.bin         uint8 (or uint16) [count, height, width, channels], row-major; or encoded files end to end
    train.index.npz          targets, names, and for encoded files where each begins
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.reference import Opened, Request
from vitrail.data.types import Array, Names, Payload, Split, Task
from vitrail.errors import VitrailError

FORMAT, VERSION = "vitrail-packed", 1


class PackedSplit(Split):
    """Images in one memory-mapped file; the map is opened where it is used, so a pickled split is small."""

    def __init__(self, folder: Path, name: str, about: dict[str, Any], task: Task, classes: tuple[str, ...]) -> None:
        self.name, self.task, self.classes = name, task, classes
        self.file = folder / about["images"]
        self._shape = tuple(about["shape"]) if about["shape"] else None
        self._dtype = np.dtype(about["dtype"])
        with np.load(folder / about["index"], allow_pickle=False) as index:
            self.targets = index["targets"]
            self._names = Names.from_arrays(index["name_block"], index["name_ends"])
            self._ends = index["ends"] if self._shape is None else None
        self._map: Array | None = None

    def image_name(self, index: int) -> str:
        return self._names[index]

    def payload(self, index: int) -> Payload:
        content = self._opened()
        if self._ends is None:
            image: Array = content[index]
            return image
        start = int(self._ends[index - 1]) if index % len(self._ends) else 0
        return bytes(content[start : int(self._ends[index])])

    @property
    def arrays(self) -> Array | None:
        return self._opened() if self._shape is not None else None

    def _opened(self) -> Array:
        if self._map is None:
            empty = len(self) == 0  # an empty file cannot be mapped
            if self._shape is None:
                flat = np.empty(0, np.uint8) if empty else np.memmap(self.file, np.uint8, "r")
                self._map = np.asarray(flat)
            else:
                shape = (len(self.targets), *self._shape)
                images = np.empty(shape, self._dtype) if empty else np.memmap(self.file, self._dtype, "r", shape=shape)
                self._map = np.asarray(images)
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}  # a memory map would be pickled as everything in it


def open_packed(request: Request) -> Opened:
    request.allow("verify")
    folder = Path(request.location).expanduser()
    about = read_about(folder)
    if request.flag("verify"):
        for fault in damages(folder, about):
            raise VitrailError(f"{fault} Pack the set again.")
    classes = tuple(about["classes"])
    splits: dict[str, Split] = {
        name: PackedSplit(folder, name, part, about["task"], classes) for name, part in about["splits"].items()
    }
    shapes = {tuple(part["shape"]) for part in about["splits"].values() if part["shape"]}
    detail = "encoded files" if not shapes else ", ".join("×".join(map(str, shape)) for shape in sorted(shapes))
    return Opened(splits=splits, detail=f"{detail}, made from {about['made_from']}")


def read_about(folder: Path) -> dict[str, Any]:
    """The description of a packed set, after a check that its files have the sizes it names."""
    unfinished = folder.with_name(f"{folder.name}.partial")
    if not (folder / "packed.json").exists():
        hint = (
            f" {unfinished} is an unfinished one: run the same `vitrail data pack` again to finish it."
            if unfinished.exists()
            else f" Make one with `vitrail data pack SOURCE {folder}`."
        )
        raise VitrailError(f"{folder} is not a packed data set: it has no packed.json.{hint}")
    try:
        about: dict[str, Any] = json.loads((folder / "packed.json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT or about["version"] != VERSION:
            raise VitrailError(
                f"{folder} is {about['format']} version {about['version']}; this Vitrail reads {FORMAT} version {VERSION}. "
                "Pack the set again, or use the Vitrail that wrote it."
            )
        for part in about["splits"].values():
            for file, size in ((part["images"], part["bytes"]), (part["index"], part["index_bytes"])):
                found = (folder / file).stat().st_size if (folder / file).exists() else None
                if found != size:
                    there = "is missing" if found is None else f"has {found:,} bytes"
                    raise VitrailError(f"{folder / file} {there}; {size:,} bytes are expected. Pack the set again.")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise VitrailError(f"{folder / 'packed.json'} is damaged ({error!r}). Pack the set again.") from error
    return about


def damages(folder: Path, about: dict[str, Any]) -> Iterator[str]:
    """A sentence for every stretch of a packed set whose checksum is not the one written down."""
    for part in about["splits"].values():
        index = folder / part["index"]
        if hashlib.sha256(index.read_bytes()).hexdigest() != part["index_sha256"]:
            yield f"{index} is damaged: its checksum has changed."
        start = 0
        with (folder / part["images"]).open("rb") as file:
            for end, digest in part["stretches"]:
                if hashlib.sha256(file.read(end - start)).hexdigest() != digest:
                    yield f"{folder / part['images']} is damaged between byte {start:,} and {end:,}."
                start = end
