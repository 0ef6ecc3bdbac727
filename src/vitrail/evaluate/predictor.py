"""Predict a stream of images in order. Images that cannot be read are reported and skipped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.checkpoints import Bundle, Prediction
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.layout import images_under, warn_of_skipped
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.evaluate.context import EvalContext, Pass, default_context
from vitrail.regular_files import read_bytes


@dataclass(frozen=True)
class ImagePredictions:
    """The predictions for one image, most probable first, or the reason why there are none."""

    name: str
    predictions: tuple[Prediction, ...] = ()
    error: str | None = None


def predict(
    bundle: Bundle, images: Split | Iterable[str | os.PathLike[str]], *, top: int = 5, context: EvalContext | None = None
) -> Iterator[ImagePredictions]:
    """Yield the `top` predictions for each image as soon as its batch is finished.

    Memory does not grow with the number of images. `images` is a split, or files, folders and lists as in `find_images`.
    """
    bundle.check_head()
    if top < 1:
        raise VitrailError(f"top is {top}; use 1 or more.")
    split = images if isinstance(images, Split) else find_images(images)
    context = context or default_context(bundle.model, bad_images="skip")
    model = context.prepare(bundle.model)
    results = context.run(split, bundle.stored_preprocess(), model, lambda batch: bundle.decode(model(batch), top))
    return _in_order(split, results)


def _in_order(split: Split, results: Pass[list[list[Prediction]]]) -> Iterator[ImagePredictions]:
    """Yield one entry per image. Indices are ascending, so a missing index is a bad image."""
    done = 0
    for predictions, batch in results:
        for row, index in zip(predictions, batch.indices.tolist(), strict=True):
            yield from (_bad_image(split, results, bad) for bad in range(done, index))
            yield ImagePredictions(split.image_name(index), tuple(row))
            done = index + 1
    yield from (_bad_image(split, results, bad) for bad in range(done, len(split)))


def _bad_image(split: Split, results: Pass[list[list[Prediction]]], index: int) -> ImagePredictions:
    name = split.image_name(index)
    bad = results.bad.get(name)
    return ImagePredictions(name, error=bad.reason if bad is not None else "cannot be read")


def find_images(paths: Iterable[str | os.PathLike[str]]) -> Split:
    """List the images of files, folders (searched recursively) and .txt lists (one path per line), in that order."""
    files: list[str] = []
    for path in paths:
        files += _images_at(os.fspath(path))
    if not files:
        raise VitrailError("No image found. Pass image files, folders of images, or .txt files that list images.")
    return file_split(files)


def file_split(files: Sequence[str]) -> Split:
    """Make an unlabelled split of files. Image names are the paths as given."""
    split = FileSplit("images", "unlabelled", Path(), files, np.empty((len(files), 0), np.float32), ())
    split.root = ""
    return split


def _images_at(given: str) -> list[str]:
    path = Path(given).expanduser()
    if path.is_dir():
        skipped: list[BadImage] = []
        files = [str(path / name) for name in images_under(path, special=skipped)]
        warn_of_skipped(given, skipped)
        if not files:
            raise VitrailError(f"There is no image in the folder {given} or its subfolders.")
        return files
    if path.suffix.lower() == ".txt":
        return _read_list(path)
    if not path.exists():
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
    folder = path.parent
    return [str(folder / name) if not Path(name).exists() and (folder / name).exists() else name for name in names]
