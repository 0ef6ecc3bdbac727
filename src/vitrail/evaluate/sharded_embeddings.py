"""Embeddings in a folder of shards, searched without loading them all: a block of rows is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from vitrail.data.types import PackedStrings
from vitrail.errors import VitrailError, reason_of
from vitrail.evaluate.parquet import as_text, opened_table
from vitrail.evaluate.shard_folder import read_manifest
from vitrail.regular_files import parse_json
from vitrail.text import to_bytes

Array = npt.NDArray[Any]
ABOUT = ("checkpoint", "model", "features", "preprocess")
_BLOCK = 1 << 26  # bytes of features in memory at a time


@dataclass(frozen=True)
class Shard:
    """One file of features."""

    file: Path
    images: int

    def names(self) -> PackedStrings:
        with self._reading():
            if self.file.suffix == ".parquet":
                with opened_table(self.file) as table:
                    names = PackedStrings(map(as_text, table.read(columns=["name"])["name"].to_pylist()))
            else:
                with _safe_open(self.file) as content:
                    names = PackedStrings.from_arrays(content.get_tensor("names"), content.get_tensor("name_ends"))
            self._check_rows(len(names))
            return names

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the features of an image, from the header of the file."""
        with self._reading():
            if self.file.suffix == ".parquet":
                with opened_table(self.file) as table:
                    self._check_rows(table.metadata.num_rows)
                    return tuple(self._parquet_shape(table))
            with _safe_open(self.file) as content:
                rows, *shape = content.get_slice("features").get_shape()
                self._check_rows(rows)
                return tuple(shape)

    def _check_rows(self, rows: int) -> None:
        if rows != self.images:
            raise ValueError(f"it has {rows} rows, {self.images} are expected")

    def blocks(self) -> Iterator[Array]:
        """Yield the features, some rows at a time. safetensors files are memory-mapped."""
        rows = max(1, _BLOCK // max(4, 4 * int(np.prod(self.shape()))))
        with self._reading():
            if self.file.suffix == ".parquet":
                yield from self._parquet_blocks(rows)
                return
            with _safe_open(self.file) as content:
                features = content.get_slice("features")
                for first in range(0, self.images, rows):
                    yield features[first : min(first + rows, self.images)]

    def row(self, row: int) -> Array:
        with self._reading():
            if self.file.suffix == ".safetensors":
                with _safe_open(self.file) as content:
                    return np.asarray(content.get_slice("features")[row : row + 1][0])
        first = 0
        for block in self.blocks():
            if row < first + len(block):
                return np.asarray(block[row - first])
            first += len(block)
        raise IndexError(row)

    def _parquet_blocks(self, rows: int) -> Iterator[Array]:
        with opened_table(self.file) as table:
            shape = self._parquet_shape(table)
            for batch in table.iter_batches(batch_size=rows, columns=["features"]):
                values = batch.column(0).flatten().to_numpy(zero_copy_only=False).astype(np.float32)
                yield values.reshape(-1, *shape)

    def _parquet_shape(self, table: Any) -> list[int]:
        return list(parse_json(table.schema_arrow.metadata[b"vitrail"])["shape"])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (VitrailError, GeneratorExit):
            raise
        except Exception as error:  # SafetensorError, ArrowInvalid, KeyError, OSError: each library has its own
            raise VitrailError(
                f"{self.file} cannot be read ({type(error).__name__}: {error}). Run the command that wrote this folder again: it "
                "computes what is corrupted or missing."
            ) from error


def _safe_open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="np")


class ShardNames(Sequence[str]):
    """The names of all images, those of a few shards in memory, and access to their features."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._ends = np.cumsum([shard.images for shard in shards])
        self._shape: tuple[int, ...] | None = None
        self._read = lru_cache(8)(lambda number: shards[number].names())

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, row: int) -> tuple[int, int]:
        """Return the number of the shard, and the row in it."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        return number, row - (int(self._ends[number]) - self._shards[number].images)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...
    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        if isinstance(row, slice):
            return [self[k] for k in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(row)
        number, inside = self.locate(row)
        name: str = self._read(number)[inside]
        return name

    def ending(self, tail: str) -> Iterator[tuple[int, str]]:
        """Yield row and name of the images whose names end so; only shards that have the text at all are looked at by name."""
        encoded, first = to_bytes(tail), 0
        for number, shard in enumerate(self._shards):
            names = self._read(number)
            if encoded in names.to_arrays()[0].tobytes():
                found = ((first + row, names[row]) for row in range(shard.images))
                yield from ((row, name) for row, name in found if name.endswith(tail))
            first += shard.images

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the features of an image, after a look at the header of each file."""
        if self._shape is None:
            shapes = {shard.shape() for shard in self._shards}
            if len(shapes) != 1:
                raise VitrailError(f"The shards have features of different shapes: {sorted(shapes)}. Embed the images again.")
            self._shape = shapes.pop()
        return self._shape

    def row(self, row: int) -> Array:
        """Return the features of one image."""
        number, inside = self.locate(row)
        return self._shards[number].row(inside)

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """Yield (first row, features) of all images, some rows at a time."""
        first = 0
        for shard in self._shards:
            for block in shard.blocks():
                yield first, block
                first += len(block)


def open_shards(folder: Path) -> tuple[dict[str, Any], list[Shard]]:
    """Return what a folder of `vitrail embed` says about its features, and its shards."""
    manifest = read_manifest(folder)
    if manifest.get("command") != "embed":
        raise VitrailError(
            f"{folder} holds the shards of `vitrail {manifest.get('command')}`; a folder of `vitrail embed` is needed."
        )
    try:
        return {key: manifest[key] for key in ABOUT}, [_shard(folder, entry) for entry in manifest["shards"]]
    except (KeyError, TypeError, ValueError) as error:
        raise VitrailError(
            f"{folder}/manifest.json is corrupted ({reason_of(error)}). Run the command that wrote it again."
        ) from error


def _shard(folder: Path, entry: dict[str, Any]) -> Shard:
    images, bad = entry["images"], entry["bad"]
    if not (isinstance(images, int) and isinstance(bad, int) and 0 <= bad <= images < 1 << 53):
        raise ValueError(f"a shard has {images!r} images and {bad!r} bad ones")
    return Shard(folder / Path(entry["file"]).name, images - bad)
