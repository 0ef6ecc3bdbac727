"""Map classes by name: all splits use the class order of the checkpoint or of the training split.

Mapped by index, a validation set with one missing class folder would score 3 %. So classes are matched by name, digits
in names sort as numbers, and mismatches are reported before the model sees any data.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable

import numpy as np

from vitrail.data import imagenet
from vitrail.data.types import Array, Split
from vitrail.errors import VitrailError, counted

log = logging.getLogger("vitrail.data")

_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
_ALIASES = {alias: name for name, aliases in _SPLITS.items() for alias in aliases}


def split_name(word: str) -> str | None:
    """Return `train`, `val` or `test` for any of their usual names, else None."""
    return _ALIASES.get(word.strip().casefold())


def natural_sort(names: Iterable[str]) -> tuple[str, ...]:
    """Sort with digits compared as numbers: 1, 2, 10 and img2, img10. Equal keys (`1` and `01`) are compared as text."""
    return tuple(sorted(names, key=lambda name: (_natural_key(name), name)))


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"0*([0-9]+)", name)  # not int(part), which refuses more than 4,300 digits
    return [(0, len(part), part) if k % 2 else (1, 0, part) for k, part in enumerate(parts) if part]


def align(splits: dict[str, Split], classes: tuple[str, ...] | None, *, ignore_unknown: bool = False) -> dict[str, Split]:
    """Return the splits with their targets mapped to one list of classes.

    `classes` comes from a checkpoint. Default: the classes of the training split, or of the first split.
    """
    given = classes is not None
    if classes is None:
        classes = splits["train" if "train" in splits else next(iter(splits))].classes
    if len(set(classes)) != len(classes):
        duplicate = next(name for name in classes if classes.count(name) > 1)
        count = classes.count(duplicate)
        times = "twice" if count == 2 else f"{count} times"
        raise VitrailError(f"The class {duplicate!r} is listed {times}. Class names must be unique: rename or remove one.")
    owner = "the model" if given else "the training split"
    return {name: _remap(split, classes, owner, ignore_unknown) for name, split in splits.items()}


def _remap(split: Split, classes: tuple[str, ...], owner: str, ignore_unknown: bool) -> Split:
    if split.task == "unlabelled":
        return split
    if split.task == "regress":
        if split.classes != classes:
            raise VitrailError(
                f"{split.name} has the numeric targets {abbreviate(split.classes)}, but {owner} has {abbreviate(classes)}. "
                "They must be the same, in the same order."
            )
        return split
    index = output_indices(classes)
    used = _used(split)
    unknown = [name for name, present in zip(split.classes, used, strict=True) if present and name not in index]
    if unknown and not ignore_unknown:
        others = len(unknown) - 1
        more = f" {counted(others, 'more class is', 'more classes are')} unknown." if others else ""
        it, its = ("them", "their") if others else ("it", "its")
        advice = f"Remove {it}, or pass --ignore-unknown-classes to skip {its} images."
        if len(split.classes) == len(classes) and not any(name in index for name in split.classes):
            advice = (
                f"No name is known, but both have {len(classes)} classes: if their order is the same, evaluate with --match order."
            )
        raise VitrailError(
            f"{split.name} has class {unknown[0]!r}, which {owner} does not have ({abbreviate(classes)}).{more} {advice}"
        )
    new = np.array([index.get(name, -1) for name in split.classes], dtype=np.int64)
    mapped = copy.copy(split)
    mapped.classes = classes
    if split.task == "multilabel":
        mapped.targets = np.zeros((len(split), len(classes)), np.float32)
        mapped.targets[:, new[new >= 0]] = split.targets[:, new >= 0]
        if unknown:
            log.warning("%s: unknown labels ignored: %s.", split.name, abbreviate(unknown))
    else:
        mapped.targets = new[split.targets] if len(split) else split.targets
        if unknown:
            known = np.flatnonzero(mapped.targets >= 0)
            dropped = counted(len(split) - len(known), "image")
            log.warning("%s: skipped %s of unknown classes (%s).", split.name, dropped, abbreviate(unknown))
            mapped = _select(mapped, known)
    _warn_about_missing(mapped)
    return mapped


def output_indices(classes: tuple[str, ...]) -> dict[str, int]:
    """Return the index of each class by name; of ImageNet's classes also by WordNet ID, as its folders are named."""
    ids = imagenet.recognise(classes) or ()
    return {name: k for k, name in enumerate(ids)} | {name: k for k, name in enumerate(classes)}


def _select(split: Split, indices: Array) -> Split:
    split.targets = np.where(split.targets < 0, 0, split.targets)
    return split.subset(indices)


def _used(split: Split) -> Array:
    if split.task == "multilabel":
        return np.asarray(split.targets.any(0))
    check_range(split)
    return np.bincount(split.targets, minlength=len(split.classes)) > 0


def _warn_about_missing(split: Split) -> None:
    used = _used(split)
    missing = [name for name, present in zip(split.classes, used, strict=True) if not present]
    if missing and len(split):
        text = f"{split.name} has no image of {len(missing)} of {counted(len(used), 'class', 'classes')}: {abbreviate(missing)}."
        log.warning("%s", text, extra={"kind": "missing-class"})


def check_range(split: Split) -> None:
    """Refuse a label outside the classes here, with the image's name; in a GPU kernel it would be a device assert."""
    if split.task != "classify" or not len(split):
        return
    wrong = np.flatnonzero((split.targets < 0) | (split.targets >= len(split.classes)))
    if len(wrong):
        first = int(wrong[0])
        raise VitrailError(
            f"{split.image_name(first)} has label {int(split.targets[first])}, but there are "
            f"{counted(len(split.classes), 'class', 'classes')} (0 to {len(split.classes) - 1}). "
            f"{counted(len(wrong), 'label is', 'labels are')} outside. Correct the labels of the dataset."
        )


def abbreviate(names: Iterable[str], limit: int = 8) -> str:
    """Return the first names of a list, separated by commas, and how many there are."""
    names = list(names)
    return ", ".join(names[:limit]) + (f", … ({len(names)} in total)" if len(names) > limit else "")
