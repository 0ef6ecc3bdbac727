"""`packed:DIR`: a dataset written by `vitrail data pack`, memory-mapped and read without decoding.

A packed dataset is a folder:

    packed.json              description: classes, task, settings, and the size and checksums of every file
    train.images.bin         uint8 (or uint16) [count, height, width, channels], row-major; or concatenated encoded files
    train.index.npz          targets, names, and the end offset of each encoded file
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.types import Array, PackedStrings, Payload, Split, Task
from vitrail.errors import VitrailError, counted

FORMAT, VERSION = "vitrail-packed", 2


class PackedSplit(Split):
    """Images in one memory-mapped file. The map is opened on first use, so a pickled split is small."""

    def __init__(self, folder: Path, name: str, entry: dict[str, Any], task: Task, classes: tuple[str, ...]) -> None:
        self.name, self.task, self.classes = name, task, classes
        self.file = folder / entry["images"]
        self._shape = tuple(entry["shape"]) if entry["shape"] else None
        self._dtype = np.dtype(entry["dtype"])
        with np.load(folder / entry["index"], allow_pickle=False) as index:
            self.targets = index["targets"]
            self._names = PackedStrings.from_arrays(index["name_block"], index["name_ends"])
            self._ends = index["ends"] if self._shape is None else None
        self._map: Array | None = None

    def image_name(self, index: int) -> str:
        return self._names[index]

    def payload(self, index: int) -> Payload:
        content = self._mapped()
        if self._ends is None:
            image: Array = content[index]
            return image
        start = int(self._ends[index - 1]) if index % len(self._ends) else 0
        return bytes(content[start : int(self._ends[index])])

    @property
    def arrays(self) -> Array | None:
        return self._mapped() if self._shape is not None else None

    def _mapped(self) -> Array:
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
        return {**self.__dict__, "_map": None}  # pickling a memory map would copy its content


def open_packed(request: Request) -> OpenResult:
    request.allow_options("verify")
    folder = Path(request.location).expanduser()
    description = read_description(folder)
    if request.flag("verify"):
        for error in checksum_errors(folder, description):
            raise VitrailError(f"{error} Pack the dataset again.")
    classes = tuple(description["classes"])
    splits: dict[str, Split] = {
        name: PackedSplit(folder, name, part, description["task"], classes) for name, part in description["splits"].items()
    }
    shapes = {tuple(part["shape"]) for part in description["splits"].values() if part["shape"]}
    detail = "encoded files" if not shapes else ", ".join("×".join(map(str, shape)) for shape in sorted(shapes))
    return OpenResult(splits=splits, detail=f"{detail}, packed from {description['made_from']}")


def read_description(folder: Path) -> dict[str, Any]:
    """Read the description of a packed dataset, and check that its files have the sizes stored there."""
    unfinished = folder.with_name(f"{folder.name}.partial")
    if not (folder / "packed.json").exists():
        hint = (
            f" {unfinished} is unfinished: run the same `vitrail data pack` again to resume."
            if unfinished.exists()
            else f" Create one with `vitrail data pack SOURCE {folder}`."
        )
        raise VitrailError(f"{folder} is not a packed dataset: it has no packed.json.{hint}")
    try:
        description: dict[str, Any] = json.loads((folder / "packed.json").read_text(encoding="utf-8"))
        description = upgrade(description)
        if description["format"] != FORMAT or description["version"] != VERSION:
            raise VitrailError(
                f"{folder} is {description['format']} version {description['version']}, but this Vitrail reads {FORMAT} "
                f"version {VERSION}. "
                "Pack the dataset again, or use the version of Vitrail that wrote it."
            )
        for part in description["splits"].values():
            for file, size in ((part["images"], part["bytes"]), (part["index"], part["index_bytes"])):
                found = (folder / file).stat().st_size if (folder / file).exists() else None
                if found != size:
                    state = "is missing" if found is None else f"has {counted(found, 'byte')}"
                    raise VitrailError(f"{folder / file} {state}, but {size:,} are expected. Pack the dataset again.")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise VitrailError(f"{folder / 'packed.json'} is corrupted ({error!r}). Pack the dataset again.") from error
    return description


def upgrade(description: dict[str, Any]) -> dict[str, Any]:
    """Convert a description of version 1 to the current names; return any other unchanged.

    Version 1 called the chunks `stretches` and the skipped images `left_out`.
    """
    if (description["format"], description["version"]) != (FORMAT, 1):
        return description
    renamed = {"stretches": "chunks", "left_out": "skipped"}
    splits = {name: {renamed.get(key, key): value for key, value in part.items()} for name, part in description["splits"].items()}
    return {**{renamed.get(key, key): value for key, value in description.items()}, "version": VERSION, "splits": splits}


def checksum_errors(folder: Path, description: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for every chunk of a packed dataset whose checksum is wrong."""
    for part in description["splits"].values():
        index = folder / part["index"]
        if hashlib.sha256(index.read_bytes()).hexdigest() != part["index_sha256"]:
            yield f"{index} is corrupted: its checksum has changed."
        start = 0
        with (folder / part["images"]).open("rb") as file:
            for end, digest in part["chunks"]:
                if hashlib.sha256(file.read(end - start)).hexdigest() != digest:
                    yield f"{folder / part['images']} is corrupted between bytes {start:,} and {end:,}."
                start = end
