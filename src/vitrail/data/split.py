"""Hold out part of a split: stratified, seeded, and saved to a file so that it stays the same."""

from __future__ import annotations

import csv
import logging
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vitrail.data.types import Array, Split, Subset
from vitrail.errors import VitrailError, counted
from vitrail.files import atomic_file

log = logging.getLogger("vitrail.data")
_ENCODING_ERRORS = "surrogateescape"  # file names that are not valid UTF-8 survive the round trip


def stratified(split: Split, fraction: float, *, seed: int = 0) -> Array:
    """Return the positions to hold out: `fraction` of every class, and at least one image of each class that has two.

    Each class has its own generator, keyed by seed and name, so that adding a class does not change the others.
    """
    chosen = []
    for name, members in _strata(split):
        count = round(len(members) * fraction)
        if fraction > 0 and len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        chosen.append(rng.permutation(members)[: min(count, len(members) - 1)])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def _strata(split: Split) -> list[tuple[str, Array]]:
    """Return the groups to stratify by: classes, label sets, or deciles of a numeric target."""
    if split.task == "classify":
        codes, names = split.targets, split.classes
    elif split.task == "multilabel":
        rows, codes = np.unique(split.targets, axis=0, return_inverse=True)
        codes = codes.reshape(-1)
        rare = np.bincount(codes) < 5  # label sets too rare to be divided form one group
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


def hold_out(split: Split, fraction: float, *, seed: int, split_file: Path | None) -> dict[str, Split]:
    """Divide a split into `train` and `val` as saved in `split_file`. If that does not exist yet, draw and save.

    A published dataset does not change, so it needs no file: the seed alone gives the same split again.
    """
    if fraction == 0:
        return {"train": rename(split, "train")}
    if split_file is not None and split_file.exists():
        train, val = _read_split_file(split, split_file)
    else:
        val = stratified(split, fraction, seed=seed)
        train = np.setdiff1d(np.arange(len(split)), val)
        if split_file is not None:
            _write_split_file(split, {"train": train, "val": val}, split_file)
    return {"train": rename(split.subset(train), "train"), "val": rename(split.subset(val), "val")}


def rename(split: Split, name: str) -> Split:
    """Set the name of a split in place, and return it."""
    split.name = name
    return split


def write_table(splits: Iterable[Split], file: Path) -> None:
    """Write a table `path,label,split` of splits whose images are files, to be opened as csv:FILE."""
    rows = []
    for split in splits:
        parent = split.parent if isinstance(split, Subset) else split
        indices = split.indices if isinstance(split, Subset) else np.arange(len(split))
        path = getattr(parent, "path", None)
        if path is None:
            raise VitrailError(f"The images of {split.name} are not files, so a table cannot list them. Use `vitrail data pack`.")
        for row, index in enumerate(indices):
            rows.append([_relative_path(file.parent, path(int(index))), *_labels(split, row), split.name])
    header = split.classes if split.task == "regress" else () if split.task == "unlabelled" else ("label",)
    with atomic_file(file) as temporary, temporary.open("w", newline="", encoding="utf-8", errors=_ENCODING_ERRORS) as table:
        writer = csv.writer(table)
        writer.writerow(["path", *header, "split"])
        writer.writerows(rows)


def _relative_path(folder: Path, path: str) -> str:
    base, file = folder.resolve(), Path(path).absolute()
    return file.relative_to(base).as_posix() if file.is_relative_to(base) else str(file)


def _labels(split: Split, row: int) -> list[str]:
    if split.task == "classify":
        return [split.classes[split.targets[row]]]
    if split.task == "multilabel":
        return ["|".join(split.classes[k] for k in np.flatnonzero(split.targets[row]))]
    return [repr(float(value)) for value in split.targets[row]]


def _write_split_file(split: Split, parts: dict[str, Array], split_file: Path) -> None:
    part_of = np.empty(len(split), object)
    for name, members in parts.items():
        part_of[members] = name
    try:
        with (
            atomic_file(split_file) as temporary,
            temporary.open("w", newline="", encoding="utf-8", errors=_ENCODING_ERRORS) as file,
        ):
            writer = csv.writer(file)
            writer.writerow(["path", "split"])
            writer.writerows((split.image_name(k), part_of[k]) for k in range(len(split)))
    except (OSError, VitrailError):
        log.warning("Cannot save the split to %s. The same seed and the same files give the same split.", split_file)


def _read_split_file(split: Split, split_file: Path) -> tuple[Array, Array]:
    with split_file.open(newline="", encoding="utf-8", errors=_ENCODING_ERRORS) as file:
        rows = {row["path"]: row["split"] for row in csv.DictReader(file)}
    position = {split.image_name(k): k for k in range(len(split))}
    missing = [name for name in rows if name not in position]
    if missing:
        raise VitrailError(
            f"{split_file} lists {counted(len(missing), 'image')} that cannot be found, for example {missing[0]}. "
            "Restore them, or delete this file to draw a new split."
        )
    new = len(position) - len(rows)
    if new:
        skipped = counted(new, "image")
        log.warning("Skipped %s not listed in %s. Delete this file to draw a new split.", skipped, split_file)
    parts = {part: [position[name] for name, assigned in rows.items() if assigned == part] for part in ("train", "val")}
    return np.sort(np.array(parts["train"], np.int64)), np.sort(np.array(parts["val"], np.int64))
