"""From labels as they are written, one text (or several numbers) an image, to targets and class names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitrail.data.classes import in_natural_order
from vitrail.data.types import Array, Split, Task
from vitrail.errors import VitrailError

TASKS: tuple[Task, ...] = ("classify", "multilabel", "regress", "unlabelled")


def task_of(labels: list[list[str]], wanted: str | None) -> Task:
    """The task asked for; else several labels where one is written a|b, numbers where one has a fraction, or classes."""
    for task in TASKS:
        if wanted == task:
            return task
    if wanted is not None:
        raise VitrailError(f"task={wanted}: the task must be one of {', '.join(TASKS)}.")
    if any("|" in cell for cells in labels for cell in cells):
        return "multilabel"
    numbers = all(_number(cell) is not None for cells in labels for cell in cells)
    whole = all(cell.lstrip("+-").isdigit() for cells in labels for cell in cells)
    return "regress" if numbers and not whole else "classify"


def targets_of(
    labels: list[list[str]], task: Task, columns: tuple[str, ...], where: Callable[[int], str]
) -> tuple[Array, tuple[str, ...]]:
    """(targets, class names). `where(row)` says in an error where a row was written."""
    if task == "unlabelled":
        return np.empty((len(labels), 0), np.float32), ()
    if task == "regress":
        return _numeric(labels, where), columns
    if task == "multilabel":
        return _multi_hot([[word.strip() for word in cells[0].split("|") if word.strip()] for cells in labels])
    for row, cells in enumerate(labels):
        if not cells[0]:
            raise VitrailError(f"{where(row)}: the label is empty. Fill it in, or remove the image.")
    classes = in_natural_order({cells[0] for cells in labels})
    index = {name: place for place, name in enumerate(classes)}
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
    classes = in_natural_order({word for words in sets for word in words})
    index = {name: place for place, name in enumerate(classes)}
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


def own_classes(split: Split) -> Split:
    """Only the classes this split really has, so that the training split decides and another cannot add to it."""
    if split.task not in ("classify", "multilabel"):
        return split
    used = np.unique(split.targets) if split.task == "classify" else np.flatnonzero(split.targets.any(0))
    split.classes = tuple(split.classes[k] for k in used)
    if split.task == "classify":
        split.targets = np.searchsorted(used, split.targets)
    else:
        split.targets = split.targets[:, used]
    return split
