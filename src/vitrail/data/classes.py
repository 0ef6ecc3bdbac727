"""Class maps by name: one order of classes, taken from the checkpoint or the training split, for every split.

An index without its name is how a validation set with one empty folder comes to score 3 %. So labels are compared by
name, numbers in names sort as numbers, and what does not fit is said before the model sees it.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable

import numpy as np

from vitrail.data.types import Array, Split, counted
from vitrail.errors import VitrailError

log = logging.getLogger("vitrail.data")

_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
_ALIASES = {alias: name for name, aliases in _SPLITS.items() for alias in aliases}


def split_name(word: str) -> str | None:
    """`train`, `val` or `test` for any of their usual names, else None."""
    return _ALIASES.get(word.strip().casefold())


def in_natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sorted with runs of digits as numbers: 1, 2, 10 and img2, img10. Equal keys (`1` and `01`) fall back on the text."""
    return tuple(sorted(names, key=lambda name: (_natural_key(name), name)))


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if place % 2 else (1, 0, part) for place, part in enumerate(parts) if part]


def align(splits: dict[str, Split], classes: tuple[str, ...] | None, *, ignore_unknown: bool = False) -> dict[str, Split]:
    """The same splits with their targets numbered by one common list of classes.

    `classes` comes from a checkpoint; without it the training split (or the first there is) gives the list.
    """
    given = classes is not None
    if classes is None:
        classes = splits["train" if "train" in splits else next(iter(splits))].classes
    if len(set(classes)) != len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise VitrailError(f"The class {twice!r} is listed twice; every class needs its own name.")
    owner = "the model" if given else "the training split"
    return {name: _mapped(split, classes, owner, ignore_unknown) for name, split in splits.items()}


def _mapped(split: Split, classes: tuple[str, ...], owner: str, ignore_unknown: bool) -> Split:
    if split.task == "unlabelled":
        return split
    if split.task == "regress":
        if split.classes != classes:
            raise VitrailError(
                f"{split.name} has the numeric targets {_some(split.classes)}, {owner} has {_some(classes)}. "
                "They must be the same, in the same order."
            )
        return split
    index = {name: place for place, name in enumerate(classes)}
    used = _used(split)
    unknown = [name for name, there in zip(split.classes, used, strict=True) if there and name not in index]
    if unknown and not ignore_unknown:
        raise VitrailError(
            f"{split.name} has class {unknown[0]!r} unknown to {owner} ({_some(classes)})."
            f"{f' So have {len(unknown) - 1} more.' if len(unknown) > 1 else ''} "
            "Remove it, or pass --ignore-unknown-classes to leave its images out."
        )
    new = np.array([index.get(name, -1) for name in split.classes], dtype=np.int64)
    mapped = copy.copy(split)
    mapped.classes = classes
    if split.task == "multilabel":
        mapped.targets = np.zeros((len(split), len(classes)), np.float32)
        mapped.targets[:, new[new >= 0]] = split.targets[:, new >= 0]
        if unknown:
            log.warning("%s: the unknown labels %s left out.", split.name, _some(unknown))
    else:
        mapped.targets = new[split.targets] if len(split) else split.targets
        if unknown:
            known = np.flatnonzero(mapped.targets >= 0)
            dropped = counted(len(split) - len(known), "image")
            log.warning("%s: %s of unknown classes (%s) left out.", split.name, dropped, _some(unknown))
            mapped = _narrowed(mapped, known)
    _warn_of_missing(mapped)
    return mapped


def _narrowed(split: Split, kept: Array) -> Split:
    split.targets = np.where(split.targets < 0, 0, split.targets)
    return split.subset(kept)


def _used(split: Split) -> Array:
    if split.task == "multilabel":
        return np.asarray(split.targets.any(0))
    check_range(split, len(split.classes))
    return np.bincount(split.targets, minlength=len(split.classes)) > 0


def _warn_of_missing(split: Split) -> None:
    used = _used(split)
    missing = [name for name, there in zip(split.classes, used, strict=True) if not there]
    if missing and len(split):
        text = f"{split.name} has no image of {len(missing)} of the {len(used)} classes: {_some(missing)}."
        log.warning("%s", text, extra={"kind": "missing-class"})


def check_range(split: Split, outputs: int) -> None:
    """Refuse a label beyond the model's outputs here, by the image's name, rather than deep inside a GPU kernel."""
    if split.task != "classify" or not len(split):
        return
    wrong = np.flatnonzero((split.targets < 0) | (split.targets >= outputs))
    if len(wrong):
        first = int(wrong[0])
        raise VitrailError(
            f"label {int(split.targets[first])} at {split.image_name(first)} but there are {outputs} outputs "
            f"(0–{outputs - 1}); {counted(len(wrong), 'such label')} in all. Correct them, or make a model with more outputs."
        )


def _some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")
