"""`packed:DIR`: a dataset written by `vitrail data pack`, memory-mapped and read without decoding.

A packed dataset is a folder:

    packed.json              description: classes, task, settings, and the size and checksums of every file
    train.images.bin         uint8 (or uint16) [count, height, width, channels], row-major; or concatenated encoded files
    train.index.npz          targets, names, and the end offset of each encoded file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.packed_files import check_size, checksum_errors, read_description, read_index
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.types import Array, BadImage, PackedStrings, Payload, Split, Task
from vitrail.errors import VitrailError


class PackedSplit(Split):
    """Images in one memory-mapped file. The map is opened on first use, so a pickled split is small."""

    def __init__(self, folder: Path, name: str, entry: dict[str, Any], task: Task, classes: tuple[str, ...]) -> None:
        self.name, self.task, self.classes = name, task, classes
        self.file = folder / entry["images"]
        self._shape = tuple(entry["shape"]) if entry["shape"] else None
        self._dtype = np.dtype(entry["dtype"])
        self._bytes = entry["bytes"]
        index = read_index(folder / entry["index"], entry, task, classes)
        self.targets = index["targets"]
        self._names = PackedStrings.from_arrays(index["name_block"], index["name_ends"])
        self._ends = index["ends"] if self._shape is None else None
        self._map: Array | None = None

    def image_name(self, index: int) -> str:
        return self._names[index]

    @property
    def packed_names(self) -> PackedStrings:
        return self._names

    def payload(self, index: int) -> Payload:
        if self._ends is None:
            image: Array = self._mapped()[index]
            return image
        start = int(self._ends[index - 1]) if index % len(self._ends) else 0
        size = int(self._ends[index]) - start
        with self.file.open("rb") as file:  # not mapped: if the file becomes shorter, a read fails, but a map kills the process
            file.seek(start)
            content: bytes = file.read(size)
        if len(content) != size:
            raise BadImage(self.image_name(index), f"{self.file} ends before the image is complete", "Pack the dataset again.")
        return content

    @property
    def arrays(self) -> Array | None:
        return self._mapped() if self._shape is not None else None

    def _mapped(self) -> Array:
        if self._map is None:
            assert self._shape is not None
            shape = (len(self.targets), *self._shape)
            check_size(self.file, self._bytes)  # it may have changed since the description was read
            images = np.memmap(self.file, self._dtype, "r", shape=shape) if len(self) else np.empty(shape, self._dtype)
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
    return OpenResult(splits=splits, detail=f"{detail}, packed from {description['made_from']}", made_from=description["made_from"])
