"""Holding out part of a split: stratified, from a seed, and written down so that it stays the same."""

from __future__ import annotations

import csv
import logging
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vitrail.data.types import Array, Split, Subset, counted
from vitrail.errors import VitrailError
from vitrail.files import atomic_file

log = logging.getLogger("vitrail.data")
_KEEP = "surrogateescape"  # a file's name need not be text, and comes back as it was


def stratified(split: Split, fraction: float, *, seed: int = 0) -> Array:
    """Positions to hold out: `fraction` of every class, at least one image of each class that has two.

    Each class draws from its own stream, keyed by seed and name, so that one more class does not move the others.
    """
    chosen = []
    for name, members in _strata(split):
        count = round(len(members) * fraction)
        if fraction > 0 and len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
        chosen.append(stream.permutation(members)[: min(count, len(members) - 1)])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def _strata(split: Split) -> list[tuple[str, Array]]:
    """Groups that should be represented alike: classes, sets of labels, or tenths of a numeric target."""
    if split.task == "classify":
        codes, names = split.targets, split.classes
    elif split.task == "multilabel":
        rows, codes = np.unique(split.targets, axis=0, return_inverse=True)
        codes = codes.reshape(-1)
        rare = np.bincount(codes) < 5  # sets of labels too rare to be shared out are shared out together
        codes = np.where(rare[codes], len(rows), codes)
        names = (*("|".join(np.flatnonzero(row).astype(str)) for row in rows), "rare")
    elif split.task == "regress":
        rank = split.targets[:, 0].argsort(kind="stable").argsort(kind="stable")
        codes, names = rank * 10 // max(1, len(rank)), tuple(map(str, range(10)))
    else:
        codes, names = np.zeros(len(split), np.int64), ("all",)
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(names) + 1))
    groups = [(name, order[starts[k] : starts[k + 1]]) for k, name in enumerate(names)]
    return [(name, members) for name, members in groups if len(members)]


def held_out(split: Split, fraction: float, *, seed: int, record: Path | None) -> dict[str, Split]:
    """`split` as `train` and `val`, as `record` says; where there is no record yet, it is drawn and written.

    A set that cannot change under us, such as a published one, needs no record: the seed alone gives the split again.
    """
    if fraction == 0:
        return {"train": renamed(split, "train")}
    if record is not None and record.exists():
        train, val = _recorded(split, record)
    else:
        val = stratified(split, fraction, seed=seed)
        train = np.setdiff1d(np.arange(len(split)), val)
        if record is not None:
            _write(split, {"train": train, "val": val}, record)
    return {"train": renamed(split.subset(train), "train"), "val": renamed(split.subset(val), "val")}


def renamed(split: Split, name: str) -> Split:
    split.name = name
    return split


def write_table(splits: Iterable[Split], file: Path) -> None:
    """A table `path,label,split` of splits whose images are files, to be opened as csv:FILE."""
    rows = []
    for split in splits:
        whole = split.whole if isinstance(split, Subset) else split
        indices = split.indices if isinstance(split, Subset) else np.arange(len(split))
        path = getattr(whole, "path", None)
        if path is None:
            raise VitrailError(f"The images of {split.name} are not files, so a table cannot name them. Use `vitrail data pack`.")
        for row, index in enumerate(indices):
            rows.append([_seen_from(file.parent, path(int(index))), *_labels(split, row), split.name])
    header = split.classes if split.task == "regress" else () if split.task == "unlabelled" else ("label",)
    with atomic_file(file) as temporary, temporary.open("w", newline="", encoding="utf-8", errors=_KEEP) as table:
        writer = csv.writer(table)
        writer.writerow(["path", *header, "split"])
        writer.writerows(rows)


def _seen_from(folder: Path, path: str) -> str:
    here, there = folder.resolve(), Path(path).absolute()
    return there.relative_to(here).as_posix() if there.is_relative_to(here) else str(there)


def _labels(split: Split, row: int) -> list[str]:
    if split.task == "classify":
        return [split.classes[split.targets[row]]]
    if split.task == "multilabel":
        return ["|".join(split.classes[k] for k in np.flatnonzero(split.targets[row]))]
    return [repr(float(value)) for value in split.targets[row]]


def _write(split: Split, parts: dict[str, Array], record: Path) -> None:
    part_of = np.empty(len(split), object)
    for name, members in parts.items():
        part_of[members] = name
    try:
        with atomic_file(record) as temporary, temporary.open("w", newline="", encoding="utf-8", errors=_KEEP) as file:
            writer = csv.writer(file)
            writer.writerow(["path", "split"])
            writer.writerows((split.image_name(k), part_of[k]) for k in range(len(split)))
    except (OSError, VitrailError):
        log.warning("The split could not be saved as %s; the same seed and the same files give it again.", record)


def _recorded(split: Split, record: Path) -> tuple[Array, Array]:
    with record.open(newline="", encoding="utf-8", errors=_KEEP) as file:
        rows = {row["path"]: row["split"] for row in csv.DictReader(file)}
    position = {split.image_name(k): k for k in range(len(split))}
    gone = [name for name in rows if name not in position]
    if gone:
        raise VitrailError(
            f"{record} lists {counted(len(gone), 'image')} no longer there, such as {gone[0]}. "
            "Bring them back, or delete that file to draw a new split."
        )
    new = len(position) - len(rows)
    if new:
        left = counted(new, "image")
        log.warning("%s not listed in %s and left out; delete that file to draw a new split.", left, record)
    parts = {part: [position[name] for name, there in rows.items() if there == part] for part in ("train", "val")}
    return np.sort(np.array(parts["train"], np.int64)), np.sort(np.array(parts["val"], np.int64))
