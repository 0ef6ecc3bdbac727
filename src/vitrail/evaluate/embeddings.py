"""Store image features in a file, with image names and settings, and search nearest neighbours in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.checkpoints.references import without_download
from vitrail.data.contact_sheet import font, mention_missing
from vitrail.data.preprocess import Preprocess
from vitrail.data.thumbnails import thumbnail
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError, counted, did_you_mean, reason_of
from vitrail.evaluate.context import EvalContext, check_features, default_context
from vitrail.evaluate.features import extract_features
from vitrail.evaluate.nearest import check_vectors, nearest_rows
from vitrail.evaluate.parquet import as_text, import_pyarrow, name_column, opened_table, write_table
from vitrail.evaluate.predictor import file_split, find_images
from vitrail.evaluate.settings import FeatureSpec, Metric
from vitrail.evaluate.sharded_embeddings import ShardNames, open_shards
from vitrail.files import atomic_file
from vitrail.notebook import data_frame, html_lines, html_table, short_path
from vitrail.npy import read_npz
from vitrail.regular_files import parse_json, read_bytes
from vitrail.text import printable

Array = npt.NDArray[Any]
_CELL, _GAP, _CAPTION = 128, 8, 30
_MAX_FILE = 1 << 36
_MAX_SUGGESTED = 100_000  # names among which a similar one is looked for


class NamedRows:
    """Features with a name per row: what `Embeddings` and `ShardedEmbeddings` share."""

    names: Sequence[str]
    about: dict[str, Any]

    def named(self, tail: str) -> Iterable[tuple[int, str]]:
        """Return row and name of the images whose names end so."""
        return ((row, name) for row, name in enumerate(self.names) if name.endswith(tail))

    def matches(self, name: str) -> list[int]:
        """Return the rows of images whose path ends so."""
        return [row for row, one in self.named(name) if one.endswith(f"/{name}") or Path(one).name == name]

    def find(self, name: str) -> int:
        """Return the row of an image, by its name or the end of its path."""
        same = [row for row, one in self.named(name) if one == name]
        if same:
            return same[0]
        matches = self.matches(name)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise VitrailError(
                f"{name!r} matches {len(matches)} images, such as {self.names[matches[0]]} and {self.names[matches[1]]}. "
                "Give more of the path."
            )
        raise VitrailError(
            f"There is no image {name!r} among the {counted(len(self.names), 'embedding')}, and no file of this name."
            f"{did_you_mean(name, self.names) if len(self.names) <= _MAX_SUGGESTED else ''} "
            "Give an image that was embedded, or the path of a file."
        )

    def row_of_file(self, file: str) -> int | None:
        """Return the row of an image by its path, or by that of the same file on this machine; None if it is not here."""
        rows = [(row, one) for row, one in self.named(Path(file).name) if Path(one).name == Path(file).name]
        same = next((row for row, one in rows if one == file), None)
        if same is not None:
            return same
        real = os.path.realpath(file)
        return next((row for row, one in rows if os.path.realpath(one) == real), None)

    def _embed_files(self, files: Sequence[str], shape: Sequence[int]) -> Embeddings:
        """Embed files with the same checkpoint and settings.

        The checkpoint is named by the embeddings file, so it is not downloaded: a file from others must not choose downloads.
        """
        from vitrail.checkpoints import load

        try:
            spec = FeatureSpec(**self.about["features"])
            checkpoint = without_download(self.about["checkpoint"])
            preprocess = Preprocess.from_dict(self.about["preprocess"])
            bundle = load(checkpoint, preprocess=preprocess, image_size=preprocess.size)
        except (KeyError, TypeError, VitrailError) as error:
            why = error if isinstance(error, VitrailError) else "the checkpoint and settings of the others are not stored."
            raise VitrailError(
                f"{files[0]} was not embedded, and cannot be now: {why} "
                "Embed it together with the others, or give an image that was embedded."
            ) from error
        context = replace(default_context(bundle.model, bad_images="error"), any_size=preprocess.resize == "keep-aspect")
        more = embed(bundle, file_split(files), spec, context)
        if more.features.shape[1:] != tuple(shape):
            was, now = ("×".join(map(str, one)) for one in (shape, more.features.shape[1:]))
            raise VitrailError(
                f"{files[0]} cannot be compared: {self.about['checkpoint']} now has features of size {now}, those of this file are "
                f"of size {was}. The checkpoint has changed since: embed all images again."
            )
        return more


@dataclass(frozen=True)
class Embeddings(NamedRows):
    """Features [n, …] float32, image names, and the checkpoint and settings they were computed with."""

    features: Array
    names: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)
    bad: tuple[BadImage, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.features, dtype, copy=copy)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.features.shape))
        return f"Embeddings({shape}, {self.about.get('model', 'unknown model')}, {counted(len(self.bad), 'bad image')})"

    def _repr_html_(self) -> str:
        rows = [[short_path(name), np.array2string(row.ravel()[:6], precision=3)] for name, row in self._first_rows()]
        return html_lines([repr(self)]) + html_table(["image", "first features"], rows)

    def _first_rows(self) -> list[tuple[str, Array]]:
        return list(zip(self.names[:10], self.features[:10], strict=True))

    def to_pandas(self) -> Any:
        """Return a DataFrame with one row per image and one column per feature, or one column of arrays for patches."""
        columns: dict[str, Any] = {"features": list(self.features)}
        if self.features.ndim == 2:
            columns = {str(k): self.features[:, k] for k in range(self.features.shape[1])}
        return data_frame({"image": self.names, **columns})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `.npz` (arrays `features`, `names`, `about`) or `.parquet` (columns `name`, `features`), by file extension."""
        file = Path(path)
        check_extension(file)
        with atomic_file(file) as temporary:
            if file.suffix == ".npz":
                names = np.array(self.names, dtype=np.str_)
                np.savez(temporary, features=self.features, names=names, about=np.array(json.dumps(self.about)))
            else:
                _write_parquet(self, temporary)

    def nearest(
        self, queries: Sequence[int], count: int, metric: Metric = "cosine", *, among: int | None = None
    ) -> tuple[list[Array], list[Array]]:
        """Find the `count` nearest other rows of each query row, among the first `among` rows.

        Returns the rows and their similarity or distance for each query: less than `count` if there are not as many.
        """
        check_vectors(self.features.shape[1:])
        return nearest_rows([(0, self.features[:among])], self.features[np.asarray(queries)], queries, count, metric)

    def with_images(self, files: Sequence[str]) -> Embeddings:
        """Return these embeddings with a row per file behind, computed with the same checkpoint and settings."""
        more = self._embed_files(files, self.features.shape[1:])
        return Embeddings(np.concatenate([self.features, more.features]), (*self.names, *more.names), self.about)


@dataclass(frozen=True)
class ShardedEmbeddings(NamedRows):
    """The shards of a folder, and rows behind them for images that are not in it."""

    shards: ShardNames
    about: dict[str, Any]
    more: Embeddings | None = None

    @property
    def names(self) -> Sequence[str]:  # type: ignore[override]
        return self.shards if self.more is None else _Joined(self.shards, self.more.names)

    def named(self, tail: str) -> Iterable[tuple[int, str]]:
        return self.shards.ending(tail)

    def nearest(
        self, queries: Sequence[int], count: int, metric: Metric = "cosine", *, among: int | None = None
    ) -> tuple[list[Array], list[Array]]:
        """Do as `Embeddings.nearest`, with a block of rows in memory at a time. `among` may be the number of rows of the shards."""
        assert among in (None, len(self.shards))
        check_vectors(self.shards.shape())
        rows = np.stack([self._row(query) for query in queries])
        blocks = self.shards.blocks()
        if self.more is not None and among is None:
            blocks = chain(blocks, [(len(self.shards), self.more.features)])
        return nearest_rows(blocks, rows, queries, count, metric)

    def _row(self, row: int) -> Array:
        if row < len(self.shards):
            return self.shards.row(row)
        assert self.more is not None
        return np.asarray(self.more.features[row - len(self.shards)])

    def with_images(self, files: Sequence[str]) -> ShardedEmbeddings:
        """Return these embeddings with a row per file behind, computed with the same checkpoint and settings."""
        return replace(self, more=self._embed_files(files, self.shards.shape()))


class _Joined(Sequence[str]):
    """Names of shards and of a few more images."""

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def __getitem__(self, row: Any) -> Any:
        return self._first[row] if row < len(self._first) else self._second[row - len(self._first)]


def embed(
    bundle: Bundle,
    images: Split | Sequence[str | os.PathLike[str]],
    spec: FeatureSpec | None = None,
    context: EvalContext | None = None,
) -> Embeddings:
    """Compute the features of a split, or of files, folders and lists as in `find_images`.

    Images that cannot be read are skipped and listed in `bad`.
    """
    spec, context = spec or FeatureSpec(), context or default_context(bundle.model, bad_images="skip")
    split = images if isinstance(images, Split) else find_images(images)
    preprocess = context.preprocess_for(bundle.stored_preprocess(), bundle.model)
    extracted = extract_features(bundle.model, split, preprocess, spec, context)
    names = tuple(split.image_name(int(index)) for index in extracted.indices)
    check_features(extracted.features, names)
    return Embeddings(extracted.features, names, _about(bundle, spec, preprocess), tuple(extracted.bad))


def embed_tensor(bundle: Bundle, images: Tensor, spec: FeatureSpec | None = None, context: EvalContext | None = None) -> Embeddings:
    """Compute the features of images that are preprocessed already, [images, channels, height, width]."""
    spec, context = spec or FeatureSpec(), context or default_context(bundle.model)
    spec.check(bundle.model)
    if len(images) == 0:
        raise VitrailError("The tensor has no images; give at least one.")
    model = context.prepare(bundle.model)
    parts = context.run_tensor(images, model, lambda batch: spec.compute(model, batch).float().cpu())
    names = tuple(f"image {number}" for number in range(len(images)))
    features = torch.cat(list(parts)).numpy()
    check_features(features, names)
    return Embeddings(features, names, _about(bundle, spec, None))


def _about(bundle: Bundle, spec: FeatureSpec, preprocess: Preprocess | None) -> dict[str, Any]:
    return {
        "checkpoint": bundle.report.source,
        "model": bundle.model.config.name,
        "features": spec.to_dict(),
        "preprocess": preprocess.to_dict() if preprocess is not None else None,
    }


def open_embeddings(path: str | os.PathLike[str]) -> Embeddings | ShardedEmbeddings:
    """Open a file, or a folder of shards: of the latter, only what is needed is read."""
    folder = Path(path)
    if not folder.is_dir():
        return load_embeddings(folder)
    about, shards = open_shards(folder)
    return ShardedEmbeddings(ShardNames(shards), about)


def load_embeddings(path: str | os.PathLike[str]) -> Embeddings:
    """Read a file written by `Embeddings.save`, or all of a folder of shards."""
    file = Path(path)
    if file.is_dir():
        opened = open_embeddings(file)
        assert isinstance(opened, ShardedEmbeddings)
        features = np.empty((len(opened.shards), *opened.shards.shape()), np.float32)
        for first, block in opened.shards.blocks():
            features[first : first + len(block)] = block
        return Embeddings(features, tuple(opened.shards), opened.about)
    check_extension(file)
    try:
        if file.suffix == ".parquet":
            return _read_parquet(file)
        content = read_npz(file, _MAX_FILE)
        about = parse_json(str(content["about"]))
        features, names = content["features"], content["names"]
        return _checked(features, names.tolist(), about)
    except OSError as error:
        raise VitrailError(f"Cannot read the embeddings {file}: {reason_of(error)}. Check the path.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # the last two: a column of another type than ours
        raise VitrailError(f"{file} is not an embeddings file ({reason_of(error)}). Make one with `vitrail embed`.") from error


def check_extension(file: Path) -> None:
    """Refuse a file name that is neither .npz nor .parquet, or .parquet without pyarrow."""
    if file.suffix not in (".npz", ".parquet"):
        raise VitrailError(
            f"An embeddings file must end in .npz or .parquet; {file.name!r} does not. "
            "A folder of shards has a name without a suffix."
        )
    if file.suffix == ".parquet":
        import_pyarrow(".npz")


def _write_parquet(embeddings: Embeddings, path: Path) -> None:
    arrow = import_pyarrow(".npz")
    features = embeddings.features
    flat = arrow.array(features.reshape(-1), type=arrow.float32())
    rows = arrow.FixedSizeListArray.from_arrays(flat, int(np.prod(features.shape[1:])))
    about = {**embeddings.about, "shape": list(features.shape[1:])}
    table = arrow.table({"name": name_column(embeddings.names), "features": rows})
    write_table(table.replace_schema_metadata({"vitrail": json.dumps(about)}), path)


def _read_parquet(file: Path) -> Embeddings:
    if not file.is_file():
        raise FileNotFoundError(2, "no such file", str(file))
    with opened_table(file) as opened:
        table = opened.read()
    about = parse_json((table.schema.metadata or {})[b"vitrail"])
    shape = about.pop("shape") if isinstance(about, dict) else ()
    flat = table["features"].combine_chunks()
    values = flat.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    return _checked(values.reshape(-1, *shape), list(map(as_text, table["name"].to_pylist())), about)


def _checked(features: Array, names: Any, about: Any) -> Embeddings:
    """Return what was read from a file; raise a ValueError if its parts do not belong together."""
    if not isinstance(about, dict):
        raise ValueError("its settings are not a JSON object")
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not texts or features.ndim < 1 or len(features) != len(names):
        raise ValueError("its features and names do not agree")
    return Embeddings(features, tuple(names), about)


def contact_sheet(
    path: Path, embeddings: NamedRows, queries: Sequence[int], neighbours: Sequence[Array], values: Sequence[Array]
) -> list[str]:
    """Write a PNG with a row per query: the image, then its neighbours. Returns the files that could not be read."""
    width = _GAP + (1 + max(map(len, neighbours), default=0)) * (_CELL + _GAP) + _GAP
    sheet = Image.new("RGB", (width, _GAP + len(queries) * (_CELL + _CAPTION + _GAP)), (250, 250, 247))
    draw, missing, names = ImageDraw.Draw(sheet), list[str](), list[str]()
    for line, query in enumerate(queries):
        cells = [(query, "query"), *((int(row), f"{value:.3f}") for row, value in zip(neighbours[line], values[line], strict=True))]
        top = _GAP + line * (_CELL + _CAPTION + _GAP)
        for column, (row, label) in enumerate(cells):
            left = _GAP + column * (_CELL + _GAP) + (_GAP if column else 0)
            image = _thumbnail(embeddings.names[row])
            if image is None:
                missing.append(embeddings.names[row])
                draw.rectangle((left, top, left + _CELL - 1, top + _CELL - 1), outline=(190, 40, 40))
            else:
                sheet.paste(image, (left + (_CELL - image.size[0]) // 2, top + (_CELL - image.size[1]) // 2))
            name = short_name(embeddings.names[row], 20)
            names.append(name)
            draw.text((left, top + _CELL + 2), f"{label}\n{name}", (60, 60, 66), font(11), spacing=1)
    mention_missing(names)
    with atomic_file(path) as temporary:
        sheet.save(temporary, "PNG")
    return missing


def _thumbnail(name: str) -> Image.Image | None:
    try:
        return thumbnail(read_bytes(name), _CELL, name=name)
    except (OSError, BadImage):
        return None


def short_name(name: str, max_length: int | None = None) -> str:
    """Shorten a path to its last two parts, and to `max_length` characters."""
    tail = printable("/".join(Path(name).parts[-2:]), one_line=True)
    return tail if max_length is None or len(tail) <= max_length else f"…{tail[1 - max_length :]}"
