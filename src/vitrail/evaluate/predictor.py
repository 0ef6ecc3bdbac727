"""Predict a stream of images in order. Images that cannot be read are reported and skipped."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import numpy as np
from torch import Tensor

from vitrail.checkpoints import Bundle, Prediction
from vitrail.checkpoints.download import is_url, shown_url
from vitrail.data.sources import KINDS, open_source, resolve
from vitrail.data.sources.chain import Chain, MissingImages
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.layout import images_under, is_image, is_unread_photo, warn_of_skipped
from vitrail.data.sources.reference import format_reference, parse_reference
from vitrail.data.types import BadImage, Split, Subset
from vitrail.errors import VitrailError
from vitrail.evaluate.context import EvalContext, Pass, default_context, not_finite
from vitrail.evaluate.flip_average import flip_average
from vitrail.regular_files import read_bytes


@dataclass(frozen=True)
class ImagePredictions:
    """The predictions for one image, most probable first, or the reason why there are none."""

    name: str
    predictions: tuple[Prediction, ...] = ()
    error: str | None = None


def predict(
    bundle: Bundle,
    images: Split | Iterable[str | os.PathLike[str]],
    *,
    top: int = 5,
    tta: bool = False,
    context: EvalContext | None = None,
) -> Iterator[ImagePredictions]:
    """Yield the `top` predictions for each image as soon as its batch is finished.

    Memory does not grow with the number of images. `images` is a split, or files, folders and lists as in `find_images`. With
    `tta`, predictions are averaged over each image and its mirror image.
    """
    check_prediction(bundle, top)
    split = images if isinstance(images, Split) else find_images(images)
    context = context or default_context(bundle.model, bad_images="skip")
    model = context.prepare(bundle.model)
    outputs = flip_average(bundle, model) if tta else model
    results = context.run(split, bundle.stored_preprocess(), model, lambda batch: bundle.decode(outputs(batch), top))
    return _in_order(split, results)


def check_prediction(bundle: Bundle, top: int) -> None:
    """Refuse a model without a trained head, and a `top` below 1."""
    bundle.check_head()
    if not isinstance(top, int | np.integer) or top < 1:
        raise VitrailError(f"top is {top!r}; use 1 or more.")


def predict_tensor(
    bundle: Bundle, images: Tensor, *, top: int = 5, tta: bool = False, context: EvalContext | None = None
) -> list[list[Prediction]]:
    """Return the `top` predictions for each preprocessed image [images, channels, height, width]."""
    check_prediction(bundle, top)
    context = context or default_context(bundle.model)
    model = context.prepare(bundle.model)
    outputs = flip_average(bundle, model) if tta else model
    parts = context.run_tensor(images, model, lambda batch: bundle.decode(outputs(batch), top))
    rows = [row for part in parts for row in part]
    for number, row in enumerate(rows):
        check_scores(row, f"image {number}")
    return rows


def check_scores(row: Sequence[Prediction], name: str) -> None:
    """Refuse NaN and infinity: the class next to them would look like a prediction."""
    if not all(math.isfinite(one.score) for one in row):
        raise VitrailError(not_finite(name))


def _in_order(split: Split, results: Pass[list[list[Prediction]]]) -> Iterator[ImagePredictions]:
    """Yield one entry per image. Indices are ascending, so a missing index is a bad image."""
    done = 0
    for predictions, batch in results:
        for row, index in zip(predictions, batch.indices.tolist(), strict=True):
            yield from (_bad_image(split, results, bad) for bad in range(done, index))
            check_scores(row, split.image_name(index))
            yield ImagePredictions(split.image_name(index), tuple(row))
            done = index + 1
    yield from (_bad_image(split, results, bad) for bad in range(done, len(split)))


def _bad_image(split: Split, results: Pass[list[list[Prediction]]], index: int) -> ImagePredictions:
    name = split.image_name(index)
    bad = results.bad_at.pop(index, None)
    return ImagePredictions(name, error=bad.reason if bad is not None else "cannot be read")


def find_images(paths: Iterable[str | os.PathLike[str]]) -> Split:
    """List the images of files, folders (searched recursively), .txt lists (one path per line) and data sources, in that order.

    A data source is one of `vitrail.data.open_source`: all its splits are listed, its labels are not needed.
    """
    parts: list[Split] = []
    for is_data, words in groupby([os.fspath(path) for path in paths], is_source):
        if is_data:
            parts += [split for word in words for split in _source_splits(word)]
        elif files := [file for word in words for file in _images_at(word)]:
            parts.append(file_split(files))
    if not parts:
        raise VitrailError("No image found. Pass image files, folders of images, or .txt files that list images.")
    return parts[0] if len(parts) == 1 else Chain(parts)


def is_source(word: str) -> bool:
    """Whether a word is a data source (`wds:…`, a .csv, .tar or .parquet file, a packed folder), not an image, folder or list."""
    kind, location, _ = parse_reference(word)
    if kind is not None:
        return kind in KINDS
    path = Path(location).expanduser()
    if os.path.isdir(path):  # noqa: PTH112 - False for a name that is too long, where Path raises
        return (path / "packed.json").is_file()
    is_file = os.path.exists(path)  # noqa: PTH110
    return path.suffix.lower() in (".csv", ".tsv", ".tar", ".parquet") or (location == "digits" and not is_file)


def is_image_url(word: str) -> bool:
    """Whether a word is a URL that ends like an image's; images are not downloaded one by one."""
    name = PurePosixPath(urlsplit(word).path).name if is_url(word) else ""
    return bool(name) and (is_image(name) or is_unread_photo(name))


# Options under which a source keeps the order of its images and needs no labels.
_UNLABELLED = {"csv": {"task": "unlabelled", "val": "0"}, "folder": {"labels": "none"}, "wds": {"task": "unlabelled"}}


def _source_splits(word: str) -> list[Split]:
    kind, location, options = resolve(word)
    options = {**_UNLABELLED.get(kind, {}), **options}
    source = open_source(format_reference(kind, location, options), bad_images="skip")
    splits = [_with_paths(split) for split in source.splits.values() if len(split)]
    missing = [one for one in source.skipped if one.kind == "missing"]
    return [*splits, MissingImages(missing)] if missing else splits


def _with_paths(split: Split) -> Split:
    """Name files by a path that can be opened, as in a folder that is given directly; other images keep their names."""
    parent, rows = (split.parent, split.indices.tolist()) if isinstance(split, Subset) else (split, range(len(split)))
    return file_split([parent.path(row) for row in rows]) if isinstance(parent, FileSplit) else split


def file_split(files: Sequence[str]) -> Split:
    """Make an unlabelled split of files. Image names are the paths as given."""
    split = FileSplit("images", "unlabelled", Path(), files, np.empty((len(files), 0), np.float32), ())
    split.root = ""
    return split


def _images_at(given: str) -> list[str]:
    path = Path(given).expanduser()
    if os.path.isdir(path):  # noqa: PTH112 - False for a name that is too long, where Path raises
        skipped: list[BadImage] = []
        files = [str(path / name) for name in images_under(path, special=skipped)]
        warn_of_skipped(given, skipped)
        if not files:
            raise VitrailError(f"There is no image in the folder {given} or its subfolders.")
        return files
    if path.suffix.lower() == ".txt":
        return _read_list(path)
    if is_url(given):
        raise VitrailError(f"{shown_url(given)} is a URL, and images are not downloaded. Save the image, and give the file.")
    if not os.path.exists(path):  # noqa: PTH110
        raise VitrailError(f"There is no file or folder {given}. Check the path.")
    return [str(path)]


def _read_list(path: Path) -> list[str]:
    """Read one path per line. Relative paths are tried from the working directory, then from the list's folder."""
    try:
        text = read_bytes(path).decode("utf-8-sig", "surrogateescape")  # file names need not be UTF-8
    except OSError as error:
        raise VitrailError(f"Cannot read the list {path}: {error.strerror}. Check the path.") from error
    if "\0" in text:
        raise VitrailError(f"{path} is not a text file; a list of images has one path per line.")
    names = [line.strip() for line in text.split("\n") if line.strip() and not line.startswith("#")]
    folder, exists = path.parent, os.path.exists  # False for a name that is too long, where Path raises
    if names and not any(exists(one) for name in names for one in (name, folder / name)):
        first = names[0][:100]
        raise VitrailError(
            f"No line of {path} is the path of a file; the first is {first!r}. A .txt file lists images, one path per line."
        )
    return [str(folder / name) if not exists(name) and exists(folder / name) else name for name in names]
