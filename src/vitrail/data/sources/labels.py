"""Convert labels as written, one text (or several numbers) per image, to targets and class names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitrail.data.classes import natural_sort
from vitrail.data.types import Array, Split, Task
from vitrail.errors import VitrailError

TASKS: tuple[Task, ...] = ("classify", "multilabel", "regress", "unlabelled")


def infer_task(labels: list[list[str]], requested: str | None) -> Task:
    """Return the requested task; else multilabel if a label is written a|b, regression if one has a decimal point, or classes."""
    for task in TASKS:
        if requested == task:
            return task
    if requested is not None:
        raise VitrailError(f"task={requested}: expected one of {', '.join(TASKS)}.")
    if any("|" in cell for cells in labels for cell in cells):
        return "multilabel"
    numbers = all(_number(cell) is not None for cells in labels for cell in cells)
    integers = all(cell.lstrip("+-").isdigit() for cells in labels for cell in cells)
    return "regress" if numbers and not integers else "classify"


def parse_targets(
    labels: list[list[str]], task: Task, columns: tuple[str, ...], where: Callable[[int], str]
) -> tuple[Array, tuple[str, ...]]:
    """Return (targets, class names). `where(row)` names the origin of a row in error messages."""
    if task == "unlabelled":
        return np.empty((len(labels), 0), np.float32), ()
    if task == "regress":
        return _numeric(labels, where), columns
    if task == "multilabel":
        return _multi_hot([[word.strip() for word in cells[0].split("|") if word.strip()] for cells in labels])
    for row, cells in enumerate(labels):
        if not cells[0]:
            raise VitrailError(f"{where(row)}: the label is empty. Add it, or remove the image.")
    classes = natural_sort({cells[0] for cells in labels})
    index = {name: k for k, name in enumerate(classes)}
    return np.array([index[cells[0]] for cells in labels], np.int64), classes


def _numeric(labels: list[list[str]], where: Callable[[int], str]) -> Array:
    values = np.empty((len(labels), len(labels[0])), np.float32)
    for row, cells in enumerate(labels):
        for column, cell in enumerate(cells):
            value = _number(cell)
            if value is None:
                raise VitrailError(f"{where(row)}: {cell!r} is not a finite number. Correct it, or remove the image.")
            values[row, column] = value
    return values


def _multi_hot(sets: list[list[str]]) -> tuple[Array, tuple[str, ...]]:
    classes = natural_sort({word for words in sets for word in words})
    index = {name: k for k, name in enumerate(classes)}
    hot = np.zeros((len(sets), len(classes)), np.float32)
    for row, words in enumerate(sets):
        hot[row, [index[word] for word in words]] = 1
    return hot, classes


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def drop_unused_classes(split: Split) -> Split:
    """Remove classes without images, in place, so that the classes of a split are those it contains."""
    if split.task not in ("classify", "multilabel"):
        return split
    used = np.unique(split.targets) if split.task == "classify" else np.flatnonzero(split.targets.any(0))
    split.classes = tuple(split.classes[k] for k in used)
    if split.task == "classify":
        split.targets = np.searchsorted(used, split.targets)
    else:
        split.targets = split.targets[:, used]
    return split
