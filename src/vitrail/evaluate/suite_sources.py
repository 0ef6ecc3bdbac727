"""Finding the images of a suite's task, and dividing them as the task says."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data import open_source
from vitrail.data.sources.files import FileSplit
from vitrail.data.types import Split
from vitrail.errors import VitrailError
from vitrail.evaluate.suite_layouts import open_layout
from vitrail.evaluate.suites import SuiteTask

Array = npt.NDArray[Any]
TRAIN, VALIDATION = 800, 200


@dataclass(frozen=True)
class TaskData:
    """What a task is learnt from and measured on."""

    train: Split
    test: Split
    origin: str
    """Where it was found."""
    official: bool
    """Whether these are VTAB's own 1,000 training images, which only its file lists say."""


class Missing(VitrailError):
    """A task whose images are not there."""


def open_task(task: SuiteTask, root: Path, given: Mapping[str, str] | None = None) -> TaskData:
    """The data of a task: from the source named for it, else from ROOT/NAME, else from torchvision's files in ROOT.

    Nothing is downloaded unless a source says so (torchvision:NAME?download=1, hf:NAME).
    """
    origin, splits, lists = _found(task, root, given or {})
    if lists:
        return TaskData(splits["train"], splits["test"], origin, official=True)
    _check_classes(task, splits, origin)
    if task.group is None:
        return TaskData(*_plain(task, splits, origin), origin, official=False)
    train, validation, test = divided(task, splits, origin)
    few = [_first(train, TRAIN, task, "training"), _first(validation, VALIDATION, task, "validation")]
    return TaskData(joined(few), test, origin, official=False)


def _found(task: SuiteTask, root: Path, given: Mapping[str, str]) -> tuple[str, dict[str, Split], bool]:
    if task.name in given:
        return given[task.name], dict(open_source(given[task.name]).splits), False
    folder = root / task.name
    if (folder / "train800val200.txt").is_file():
        return f"{folder} (VTAB's lists)", _listed(task, folder), True
    made = open_layout(task, folder) if folder.is_dir() else None
    if made is not None:
        return str(folder), made, False
    if task.torchvision is not None:  # before a plain folder: torchvision's own may have the same name
        reference = f"torchvision:{task.torchvision}?root={root}"
        with contextlib.suppress(VitrailError):
            return reference, dict(open_source(reference).splits), False
    if folder.is_dir():
        return str(folder), dict(open_source(f"folder:{folder}?val=0" if _single(folder) else str(folder)).splits), False
    raise Missing(how_to_get(task, root))


def _single(folder: Path) -> bool:
    """Whether a folder holds classes and not splits, so that it is to be divided here."""
    names = {item.name for item in folder.iterdir() if item.is_dir()}
    return bool(names) and not names & {"train", "val", "valid", "validation", "test"}


def how_to_get(task: SuiteTask, root: Path) -> str:
    """A sentence that says where the task's images were looked for and how to bring them there."""
    ways = [f"put it in {root / task.name}" + (f" ({task.obtain})" if task.obtain and not task.obtain.startswith("hf:") else "")]
    if task.torchvision and task.torchvision != "ImageNet":
        ways.append(f"--source {task.name}=torchvision:{task.torchvision}?root={root}&download=1")
    ways.append(f"--source {task.name}={task.obtain if task.obtain.startswith('hf:') else 'hf:OWNER/NAME'}")
    return f"{task.title} is not there: {', or '.join(ways)}."


def _listed(task: SuiteTask, folder: Path) -> dict[str, Split]:
    """The usual distribution of VTAB-1k: lists of `path label` for the 1,000 training images and the test."""
    classes = tuple(map(str, range(task.classes)))
    splits: dict[str, Split] = {}
    for name, file in (("train", "train800val200.txt"), ("test", "test.txt")):
        try:
            rows = [line.rsplit(maxsplit=1) for line in (folder / file).read_text(encoding="utf-8").splitlines() if line.strip()]
            targets = np.array([int(row[1]) for row in rows], np.int64)
        except (OSError, ValueError, IndexError) as error:
            raise VitrailError(f"{folder / file} is not a list of `path label` lines ({error}).") from error
        if len(targets) == 0 or targets.min() < 0 or targets.max() >= task.classes:
            raise VitrailError(
                f"{folder / file} has labels outside 0 to {task.classes - 1}, the {task.classes} classes of {task.title}."
            )
        splits[name] = FileSplit(name, "classify", folder, [row[0] for row in rows], targets, classes)
    return splits


def divided(task: SuiteTask, splits: dict[str, Split], origin: str) -> tuple[Split, Split, Split]:
    """(train, validation, test) as VTAB divides the set; each in a shuffled order that depends on the images' names alone."""
    divide = task.divide
    # A copy that already has all three parts is taken at its word, whatever the original form of the set.
    if divide == "own" or (divide in ("train", "whole") and {"train", "val", "test"} <= set(splits)):
        return _shuffled(_need(splits, "train", origin)), _shuffled(_need(splits, "val", origin)), _need(splits, "test", origin)
    train = _shuffled(_need(splits, "train", origin))
    if divide == "half-test":
        test = _shuffled(_need(splits, "test", origin))
        half = len(test) // 2
        return train, test.subset(np.arange(half)), test.subset(np.arange(half, len(test)))
    if divide == "whole" and set(splits) != {"train"}:
        train = _shuffled(joined(list(splits.values())))
    first = len(train) * task.shares[0] // 100
    if divide == "whole":
        second = first + len(train) * task.shares[1] // 100
        parts = (np.arange(first), np.arange(first, second), np.arange(second, len(train)))
        return train.subset(parts[0]), train.subset(parts[1]), train.subset(parts[2])
    test = _need(splits, "val" if divide == "test-is-val" else "test", origin)
    return train.subset(np.arange(first)), train.subset(np.arange(first, len(train))), test


def _plain(task: SuiteTask, splits: dict[str, Split], origin: str) -> tuple[Split, Split]:
    """Train and test of a set used whole; ImageNet's validation split is its test, Flowers' is learnt from too."""
    train = _need(splits, "train", origin)
    if "test" not in splits:
        return train, _need(splits, "val", origin)
    return (joined([train, splits["val"]]) if "val" in splits else train), splits["test"]


def _need(splits: dict[str, Split], name: str, origin: str) -> Split:
    if name not in splits:
        raise VitrailError(f"{origin} has no {name} split, which this task needs; it has {', '.join(splits)}.")
    return splits[name]


def _check_classes(task: SuiteTask, splits: dict[str, Split], origin: str) -> None:
    split = next(iter(splits.values()))
    if split.task != "classify" or len(split.classes) != task.classes:
        found = f"{len(split.classes)} classes" if split.task == "classify" else f"{split.task} targets"
        raise VitrailError(f"{origin} has {found}; {task.title} has {task.classes} classes ({task.labels}).")


def _first(split: Split, count: int, task: SuiteTask, what: str) -> Split:
    if len(split) < count:
        raise VitrailError(f"{task.title} has {len(split)} {what} images; {count} are needed. The copy is incomplete.")
    return split.subset(np.arange(count))


def _shuffled(split: Split) -> Split:
    """Sorted by a hash of the names: the same on every machine, and no class comes before another."""
    keys = [
        hashlib.blake2b(split.image_name(k).encode("utf-8", "surrogateescape"), digest_size=8).digest() for k in range(len(split))
    ]
    return split.subset(np.array(sorted(range(len(split)), key=keys.__getitem__), np.int64))


def joined(parts: list[Split]) -> Split:
    """Splits with the same classes, one after the other."""
    return parts[0] if len(parts) == 1 else _Joined(parts)


class _Joined(Split):
    def __init__(self, parts: list[Split]) -> None:
        self.parts, self.name, self.task, self.classes = parts, parts[0].name, parts[0].task, parts[0].classes
        self.targets = np.concatenate([part.targets for part in parts])
        self.ends = np.cumsum([len(part) for part in parts])

    def _place(self, index: int) -> tuple[Split, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        return self.parts[number], index - (int(self.ends[number - 1]) if number else 0)

    def image_name(self, index: int) -> str:
        part, place = self._place(index)
        return f"{part.name}/{part.image_name(place)}"

    def payload(self, index: int) -> Any:
        part, place = self._place(index)
        return part.payload(place)
