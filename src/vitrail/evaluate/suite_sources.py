"""Find the images of a suite's task and split them as VTAB does."""

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
from vitrail.data.sources.chain import Chain
from vitrail.data.sources.files import FileSplit
from vitrail.data.types import Split
from vitrail.errors import VitrailError, counted, reason_of
from vitrail.evaluate.settings import TARGETS
from vitrail.evaluate.suite_layouts import MissingData, open_layout
from vitrail.evaluate.suites import SuiteTask

Array = npt.NDArray[Any]
TRAIN, VALIDATION = 800, 200


@dataclass(frozen=True)
class TaskData:
    """The training and test images of a task."""

    train: Split
    test: Split
    origin: str
    """Where the images were found."""
    official: bool
    """Whether the training images are VTAB's official 1,000, which are known only from its file lists."""


def open_task(task: SuiteTask, root: Path, sources: Mapping[str, str] | None = None) -> TaskData:
    """Open the data of a task: from its entry in `sources`, else from ROOT/NAME, else from torchvision's files in ROOT.

    Nothing is downloaded unless a source says so (torchvision:NAME?download=1, hf:NAME).
    """
    origin, splits, official = _find(task, root, sources or {})
    if official:
        return TaskData(splits["train"], splits["test"], origin, official=True)
    _check_classes(task, splits, origin)
    if task.group is None:
        return TaskData(*_train_and_test(splits, origin), origin, official=False)
    train, validation, test = split_task(task, splits, origin)
    thousand = [_first(train, TRAIN, task, "training"), _first(validation, VALIDATION, task, "validation")]
    return TaskData(concat_splits(thousand), test, origin, official=False)


def _find(task: SuiteTask, root: Path, sources: Mapping[str, str]) -> tuple[str, dict[str, Split], bool]:
    """Return (origin, splits, whether these are VTAB's official lists)."""
    if task.name in sources:
        return sources[task.name], dict(open_source(sources[task.name]).splits), False
    folder = root / task.name
    if (folder / "train800val200.txt").is_file():
        return f"{folder} (VTAB's lists)", _read_lists(task, folder), True
    splits = open_layout(task, folder) if folder.is_dir() else None
    if splits is not None:
        return str(folder), splits, False
    if task.torchvision is not None:  # before a plain folder: torchvision's folder may have the same name
        reference = f"torchvision:{task.torchvision}?root={root}"
        with contextlib.suppress(VitrailError):
            return reference, dict(open_source(reference).splits), False
    if folder.is_dir():
        return str(folder), dict(open_source(f"folder:{folder}?val=0" if _has_no_splits(folder) else str(folder)).splits), False
    raise MissingData(missing_message(task, root))


def _has_no_splits(folder: Path) -> bool:
    """Tell whether the subfolders are classes, not splits."""
    names = {item.name for item in folder.iterdir() if item.is_dir()}
    return bool(names) and not names & {"train", "val", "valid", "validation", "test"}


def missing_message(task: SuiteTask, root: Path) -> str:
    """Say where the task's images were searched and how to get them."""
    ways = [
        f"put it in {root / task.name}"
        + (f" ({task.download_hint})" if task.download_hint and not task.download_hint.startswith("hf:") else "")
    ]
    if task.torchvision and task.torchvision != "ImageNet":
        ways.append(f"--source {task.name}=torchvision:{task.torchvision}?root={root}&download=1")
    ways.append(f"--source {task.name}={task.download_hint if task.download_hint.startswith('hf:') else 'hf:OWNER/NAME'}")
    return f"{task.title} was not found: {', or '.join(ways)}."


def _read_lists(task: SuiteTask, folder: Path) -> dict[str, Split]:
    """Read the usual distribution of VTAB-1k: lists of `path label` lines for the 1,000 training images and the test."""
    classes = tuple(map(str, range(task.classes)))
    splits: dict[str, Split] = {}
    for name, file in (("train", "train800val200.txt"), ("test", "test.txt")):
        rows = _read_list(folder / file)
        outside = [label for _, label in rows if not 0 <= label < task.classes]
        if outside:
            raise VitrailError(
                f"{folder / file} has the label {outside[0]}; {task.title} has {task.classes} classes, 0 to {task.classes - 1}."
            )
        targets = np.array([label for _, label in rows], np.int64)
        splits[name] = FileSplit(name, "classify", folder, [path for path, _ in rows], targets, classes)
    return splits


def _read_list(file: Path) -> list[tuple[str, int]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise VitrailError(
            f"Cannot read {file} ({reason_of(error)}). VTAB's lists are train800val200.txt and test.txt; copy both."
        ) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        words = line.rsplit(maxsplit=1)
        if words and not (len(words) == 2 and words[1].isdecimal()):
            raise VitrailError(f"{file}, line {number} is {line[:60]!r}; expected a path and a label, such as images/0001.jpg 3.")
        rows += [(words[0], int(words[1]))] if words else []
    if not rows:
        raise VitrailError(f"{file} is empty; expected lines with a path and a label, such as images/0001.jpg 3.")
    return rows


def split_task(task: SuiteTask, splits: dict[str, Split], origin: str) -> tuple[Split, Split, Split]:
    """Split a dataset into (train, validation, test) as VTAB does, shuffled by a hash of the image names."""
    rule = task.split_rule
    # A copy that already has all three splits is used as it is.
    if rule == "own" or (rule in ("train", "whole") and {"train", "val", "test"} <= set(splits)):
        return (
            _shuffled(_require(splits, "train", origin)),
            _shuffled(_require(splits, "val", origin)),
            _require(splits, "test", origin),
        )
    train = _shuffled(_require(splits, "train", origin))
    if rule == "half-test":
        test = _shuffled(_require(splits, "test", origin))
        half = len(test) // 2
        return train, test.subset(np.arange(half)), test.subset(np.arange(half, len(test)))
    if rule == "whole" and set(splits) != {"train"}:
        train = _shuffled(concat_splits(list(splits.values())))
    first = len(train) * task.percentages[0] // 100
    if rule == "whole":
        second = first + len(train) * task.percentages[1] // 100
        parts = (np.arange(first), np.arange(first, second), np.arange(second, len(train)))
        return train.subset(parts[0]), train.subset(parts[1]), train.subset(parts[2])
    test = _require(splits, "val" if rule == "test-is-val" else "test", origin)
    return train.subset(np.arange(first)), train.subset(np.arange(first, len(train))), test


def _train_and_test(splits: dict[str, Split], origin: str) -> tuple[Split, Split]:
    """Return (train, test) of a full dataset. Without a test split, val is the test (ImageNet); else val joins train (Flowers)."""
    train = _require(splits, "train", origin)
    if "test" not in splits:
        return train, _require(splits, "val", origin)
    return (concat_splits([train, splits["val"]]) if "val" in splits else train), splits["test"]


def _require(splits: dict[str, Split], name: str, origin: str) -> Split:
    if name not in splits:
        raise VitrailError(f"{origin} has no {name} split, which this task needs. It has {', '.join(splits)}.")
    return splits[name]


def _check_classes(task: SuiteTask, splits: dict[str, Split], origin: str) -> None:
    split = next(iter(splits.values()))
    if split.task != "classify" or len(split.classes) != task.classes:
        found = counted(len(split.classes), "class", "classes") if split.task == "classify" else TARGETS[split.task]
        raise VitrailError(f"{origin} has {found}; {task.title} has {task.classes} classes ({task.labels}).")


def _first(split: Split, count: int, task: SuiteTask, what: str) -> Split:
    if len(split) < count:
        found = counted(len(split), f"{what} image")
        raise VitrailError(f"{task.title} has {found}; {count} are needed. The copy is incomplete: download it again.")
    return split.subset(np.arange(count))


def _shuffled(split: Split) -> Split:
    """Sort by a hash of the image names: the same order on every machine, with mixed classes."""
    keys = [
        hashlib.blake2b(split.image_name(k).encode("utf-8", "surrogateescape"), digest_size=8).digest() for k in range(len(split))
    ]
    return split.subset(np.array(sorted(range(len(split)), key=keys.__getitem__), np.int64))


def concat_splits(parts: list[Split]) -> Split:
    """Concatenate splits with the same classes."""
    return parts[0] if len(parts) == 1 else _ConcatSplit(parts)


class _ConcatSplit(Chain):
    """Splits with the same classes as one, with their labels. Names begin with that of the split, so that they are unique."""

    def __init__(self, parts: list[Split]) -> None:
        super().__init__(parts)
        self.name, self.task, self.classes = parts[0].name, parts[0].task, parts[0].classes
        self.targets = np.concatenate([part.targets for part in parts])

    def image_name(self, index: int) -> str:
        part, position = self._find(index)
        return f"{part.name}/{part.image_name(position)}"
