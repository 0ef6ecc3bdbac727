"""Predictions for a stream of images, in order, with those that cannot be read named and passed over."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.checkpoints import Bundle, Prediction
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.layout import images_under
from vitrail.data.types import Split
from vitrail.errors import VitrailError
from vitrail.evaluate.measuring import bundle_preprocess
from vitrail.evaluate.running import Pass, Running, on_own_device


@dataclass(frozen=True)
class Predicted:
    """What is known of one image: its answers, best first, or why there are none."""

    name: str
    answers: tuple[Prediction, ...] = ()
    fault: str | None = None


def predict(
    bundle: Bundle, images: Split | Iterable[str | os.PathLike[str]], *, top: int = 5, running: Running | None = None
) -> Iterator[Predicted]:
    """The `top` answers for each image, as soon as its batch is done. Memory does not grow with the number of images.

    `images` are files, folders and lists, as `find_images` takes them, or a split.
    """
    bundle.check_head()
    if top < 1:
        raise VitrailError(f"top is {top}; at least one answer must be asked for.")
    split = images if isinstance(images, Split) else find_images(images)
    running = running or on_own_device(bundle.model, bad_images="skip")
    model = running.ready(bundle.model)
    passed = running.over(split, bundle_preprocess(bundle), model, lambda batch: bundle.read(model(batch), top))
    return _in_order(split, passed)


def _in_order(split: Split, passed: Pass[list[list[Prediction]]]) -> Iterator[Predicted]:
    """Indices come in ascending order, and those left out between two of them are of bad images."""
    done = 0
    for answers, batch in passed:
        for row, index in zip(answers, batch.indices.tolist(), strict=True):
            yield from (_faulty(split, passed, bad) for bad in range(done, index))
            yield Predicted(split.image_name(index), tuple(row))
            done = index + 1
    yield from (_faulty(split, passed, bad) for bad in range(done, len(split)))


def _faulty(split: Split, passed: Pass[list[list[Prediction]]], index: int) -> Predicted:
    name = split.image_name(index)
    bad = passed.bad.get(name)
    return Predicted(name, fault=bad.fault if bad is not None else "cannot be read")


def find_images(places: Iterable[str | os.PathLike[str]]) -> Split:
    """The images that files, folders (searched to the bottom) and lists (.txt, a path a line) stand for, in that order."""
    files: list[str] = []
    for place in places:
        files += _images_at(os.fspath(place))
    if not files:
        raise VitrailError("There is no image in what was given. Name image files, folders of them, or .txt files that list them.")
    return file_split(files)


def file_split(files: Sequence[str]) -> Split:
    """Files as a split without labels; their names stay as they were given."""
    split = FileSplit("images", "unlabelled", Path(), files, np.empty((len(files), 0), np.float32), ())
    split.root = ""
    return split


def _images_at(place: str) -> list[str]:
    path = Path(place).expanduser()
    if path.is_dir():
        found = [str(path / name) for name in images_under(path)]
        if not found:
            raise VitrailError(f"There is no image in the folder {place}, nor in one below it.")
        return found
    if path.suffix.lower() == ".txt":
        return _listed(path)
    if not path.exists():
        raise VitrailError(f"There is no file or folder {place}. Check the path.")
    return [str(path)]


def _listed(path: Path) -> list[str]:
    """A path a line; relative ones are looked for from here and from where the list lies."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise VitrailError(f"Cannot read the list {path}: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise VitrailError(f"{path} is not a text file; a list of images has a path a line.") from error
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    beside = path.parent
    return [str(beside / name) if not Path(name).exists() and (beside / name).exists() else name for name in names]
