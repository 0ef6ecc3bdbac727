"""Features of images as a file, with the names they belong to and how they were made; and what is near what in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from vitrail.checkpoints import Bundle
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError, nearest
from vitrail.evaluate.features import FeatureSpec, extract
from vitrail.evaluate.measuring import bundle_preprocess
from vitrail.evaluate.predicting import find_images
from vitrail.evaluate.running import Running, on_own_device
from vitrail.evaluate.thumbnails import thumbnail
from vitrail.files import atomic_file

Array = npt.NDArray[Any]
Metric = Literal["cosine", "euclidean"]
_CELL, _GAP, _CAPTION = 128, 8, 30


@dataclass(frozen=True)
class Embeddings:
    """Features [n, …] float32, the name of each image, and where the features come from."""

    features: Array
    names: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)
    bad: tuple[BadImage, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """As `.npz` (arrays `features`, `names`, `about`) or `.parquet` (columns `name`, `features`), by the path's ending."""
        file = Path(path)
        check_ending(file)
        with atomic_file(file) as temporary:
            if file.suffix == ".npz":
                names = np.array(self.names, dtype=np.str_)
                np.savez(temporary, features=self.features, names=names, about=np.array(json.dumps(self.about)))
            else:
                _write_parquet(self, temporary)

    def nearest(self, queries: Sequence[int], count: int, metric: Metric = "cosine") -> tuple[Array, Array]:
        """For each query row the `count` nearest other rows, nearest first, and their similarity or distance."""
        if self.features.ndim != 2:
            raise VitrailError(
                f"Neighbours need one vector an image; these features are {list(self.features.shape[1:])} each. Embed with mean."
            )
        rows = self.features.astype(np.float32)
        if metric == "cosine":
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        asked = rows[np.asarray(queries)]
        values = asked @ rows.T
        if metric == "euclidean":
            squares = (rows**2).sum(1)
            values = -np.sqrt(np.maximum(squares[np.asarray(queries)][:, None] + squares - 2 * values, 0))
        values[np.arange(len(asked)), np.asarray(queries)] = -np.inf
        order = np.argsort(-values, axis=1, kind="stable")[:, : min(count, len(rows) - 1)]
        found = np.take_along_axis(values, order, 1)
        return order, found if metric == "cosine" else -found

    def find(self, name: str) -> int:
        """The row of an image, by its name or the end of it."""
        if name in self.names:
            return self.names.index(name)
        ending = [row for row, one in enumerate(self.names) if one.endswith(f"/{name}") or Path(one).name == name]
        if len(ending) == 1:
            return ending[0]
        if ending:
            raise VitrailError(
                f"{name!r} could be {len(ending)} images, such as {self.names[ending[0]]} and {self.names[ending[1]]}."
            )
        raise VitrailError(f"There is no image {name!r} among the {len(self.names)} of this file.{nearest(name, self.names)}")


def embed(
    bundle: Bundle,
    images: Split | Sequence[str | os.PathLike[str]],
    spec: FeatureSpec | None = None,
    running: Running | None = None,
) -> Embeddings:
    """Features of files, folders and lists, as `vitrail predict` takes them, or of a split. Bad images are left out and named."""
    spec, running = spec or FeatureSpec(), running or on_own_device(bundle.model, bad_images="skip")
    split = images if isinstance(images, Split) else find_images(images)
    preprocess = bundle_preprocess(bundle)
    found = extract(bundle.model, split, preprocess, spec, running)
    about = {
        "checkpoint": bundle.report.source,
        "model": bundle.model.config.name,
        "features": spec.to_dict(),
        "preprocess": preprocess.to_dict(),
    }
    names = tuple(split.image_name(int(index)) for index in found.indices)
    return Embeddings(found.features, names, about, tuple(found.bad))


def load_embeddings(path: str | os.PathLike[str]) -> Embeddings:
    """What `Embeddings.save` wrote."""
    file = Path(path)
    check_ending(file)
    try:
        if file.suffix == ".parquet":
            return _read_parquet(file)
        with np.load(file, allow_pickle=False) as content:
            about = json.loads(str(content["about"]))
            return Embeddings(content["features"], tuple(content["names"].tolist()), about)
    except OSError as error:
        raise VitrailError(f"Cannot read the embeddings {file}: {error.strerror or error}. Check the path.") from error
    except (ValueError, KeyError) as error:
        raise VitrailError(f"{file} does not hold embeddings as `vitrail embed` writes them ({error}).") from error


def check_ending(file: Path) -> None:
    if file.suffix not in (".npz", ".parquet"):
        raise VitrailError(f"Embeddings are files that end in .npz or .parquet; {file.name!r} does not.")
    if file.suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise VitrailError(
            "Parquet files need pyarrow, which comes with the extra hub: pip install 'vitrail[hub]'. Or use .npz."
        ) from error
    return pyarrow


def _write_parquet(embeddings: Embeddings, path: Path) -> None:
    arrow = _pyarrow()
    features = embeddings.features
    flat = arrow.array(features.reshape(-1), type=arrow.float32())
    rows = arrow.FixedSizeListArray.from_arrays(flat, int(np.prod(features.shape[1:])))
    about = {**embeddings.about, "shape": list(features.shape[1:])}
    table = arrow.table({"name": arrow.array(embeddings.names, type=arrow.string()), "features": rows})
    arrow.parquet.write_table(table.replace_schema_metadata({"vitrail": json.dumps(about)}), path)


def _read_parquet(file: Path) -> Embeddings:
    arrow = _pyarrow()
    if not file.is_file():
        raise FileNotFoundError(2, "no such file", str(file))
    table = arrow.parquet.read_table(file)
    about = json.loads((table.schema.metadata or {})[b"vitrail"])
    shape = about.pop("shape")
    flat = table["features"].combine_chunks()
    values = flat.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    return Embeddings(values.reshape(-1, *shape), tuple(table["name"].to_pylist()), about)


def contact_sheet(path: Path, embeddings: Embeddings, queries: Sequence[int], found: Array, values: Array) -> list[str]:
    """A PNG with a row for each query: the image itself, then its neighbours. Returns the files that could not be shown."""
    width = _GAP + (1 + found.shape[1]) * (_CELL + _GAP) + _GAP
    sheet = Image.new("RGB", (width, _GAP + len(queries) * (_CELL + _CAPTION + _GAP)), (250, 250, 247))
    draw, font, missing = ImageDraw.Draw(sheet), ImageFont.load_default(11), []
    for line, query in enumerate(queries):
        cells = [(query, "query"), *((int(row), f"{value:.3f}") for row, value in zip(found[line], values[line], strict=True))]
        top = _GAP + line * (_CELL + _CAPTION + _GAP)
        for column, (row, words) in enumerate(cells):
            left = _GAP + column * (_CELL + _GAP) + (_GAP if column else 0)
            picture = _picture(embeddings.names[row])
            if picture is None:
                missing.append(embeddings.names[row])
                draw.rectangle((left, top, left + _CELL - 1, top + _CELL - 1), outline=(190, 40, 40))
            else:
                sheet.paste(picture, (left + (_CELL - picture.size[0]) // 2, top + (_CELL - picture.size[1]) // 2))
            draw.text((left, top + _CELL + 2), f"{words}\n{short_name(embeddings.names[row], 20)}", (60, 60, 66), font, spacing=1)
    with atomic_file(path) as temporary:
        sheet.save(temporary, "PNG")
    return missing


def _picture(name: str) -> Image.Image | None:
    try:
        return thumbnail(Path(name).read_bytes(), _CELL, name)
    except OSError:
        return None


def short_name(name: str, most: int | None = None) -> str:
    """The end of a path, which tells more than its beginning."""
    tail = "/".join(Path(name).parts[-2:])
    return tail if most is None or len(tail) <= most else f"…{tail[1 - most :]}"
