"""Hold out part of a split. Which images are held out depends on the images alone, never on the seed of a training run.

A source without a validation split is divided by a hash of each image's name, so that every command finds the same images again
and an added image moves at most one other in its class; so is a training split of which a run holds out a part. `stratified` draws
at random, with a seed of its own.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import logging
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vitrail.data.settings import BY_NAME, check_rule
from vitrail.data.types import Array, Source, Split, Subset
from vitrail.errors import VitrailError, counted
from vitrail.files import atomic_file
from vitrail.regular_files import read_bytes
from vitrail.text import to_bytes, to_csv

log = logging.getLogger("vitrail.data")


def lowest_hashes(split: Split, fraction: float) -> Array:
    """Return the positions to hold out: of every class, the `fraction` whose names have the lowest hashes.

    At least one image of each class that has two is held out. Label sets and numeric targets are represented in proportion.
    """
    if split.task == "classify":
        groups = _strata(split)
        counts = [min(max(round(len(members) * fraction), 1), len(members) - 1) for _, members in groups]
    else:
        total = min(max(round(len(split) * fraction), 1), len(split) - 1)
        groups = _strata(split, bins=min(10, max(1, total)))
        ends = np.cumsum([0, *(len(members) for _, members in groups)]) * total  # rounded together, so that the sum is exact
        counts = np.diff((2 * ends + len(split)) // (2 * max(1, len(split)))).tolist()
    chosen = [_by_hash(split, members)[:count] for (_, members), count in zip(groups, counts, strict=True)]
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def name_hash(split: Split, index: int) -> int:
    """Hash an image's class and file name, which are the same in a folder, a table and a packed copy, wherever they lie."""
    label = split.classes[split.targets[index]] if split.task == "classify" else ""
    return _hash(f"{label}/{split.image_name(index).rpartition('/')[2]}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(to_bytes(text), digest_size=8).digest(), "little")


def _by_hash(split: Split, members: Array) -> Array:
    """Sort positions by the hashes of their names; images with the same file name, by their whole name."""
    keys = np.fromiter((name_hash(split, int(k)) for k in members), np.uint64, len(members))
    if len(np.unique(keys)) == len(keys):
        return members[np.argsort(keys)]
    start = _common_folder(split)  # of a table with absolute paths
    whole = np.fromiter((_hash(split.image_name(int(k))[start:]) for k in members), np.uint64, len(members))
    return members[np.lexsort((whole, keys))]


def _common_folder(split: Split) -> int:
    """Return the length of the path that all names begin with."""
    names = [split.image_name(k) for k in range(len(split))]
    first, last = (name.split("/")[:-1] for name in (min(names), max(names)))
    shared = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return sum(len(part) + 1 for part, _ in shared)


def stratified(split: Split, fraction: float, *, seed: int = 0) -> Array:
    """Return the positions to hold out: `fraction` of every class, and at least one image of each class that has two.

    Each class has its own generator, keyed by seed and name, so that adding a class does not change the others.
    """
    chosen = []
    for name, members in _strata(split):
        count = round(len(members) * fraction)
        if fraction > 0 and len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        rng = np.random.default_rng([seed, zlib.crc32(to_bytes(name))])
        chosen.append(rng.permutation(members)[: min(count, len(members) - 1)])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def _strata(split: Split, bins: int = 10) -> list[tuple[str, Array]]:
    """Return the groups to stratify by: classes, label sets, or quantiles of a numeric target."""
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
        codes, names = rank * bins // max(1, len(rank)), tuple(map(str, range(bins)))
    else:
        codes, names = np.zeros(len(split), np.int64), ("all",)
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(names) + 1))
    groups = [(name, order[starts[k] : starts[k + 1]]) for k, name in enumerate(names)]
    return [(name, members) for name, members in groups if len(members)]


def hold_out(split: Split, fraction: float, *, rule: str, older_file: Path | None = None) -> dict[str, Split]:
    """Divide a split into `train` and `val`.

    Older versions saved their split to `older_file`. It is read for their runs, and no longer written.
    """
    if fraction == 0:
        return {"train": rename(split, "train")}
    if rule != BY_NAME and older_file is not None and older_file.exists():
        train, val = _read_older_file(split, older_file)
    else:
        val = _chosen(split, fraction, rule)
        train = np.setdiff1d(np.arange(len(split)), val)
    return {"train": rename(split.subset(train), "train"), "val": rename(split.subset(val), "val")}


def _chosen(split: Split, fraction: float, rule: str) -> Array:
    if rule == BY_NAME:
        return lowest_hashes(split, fraction)
    return stratified(split, fraction, seed=int(rule.removeprefix("seed-")))


def older_name(rule: str, fraction: float) -> str:
    """Return the name of the file in which older versions saved a split."""
    return f"vitrail-split-{rule.replace('-', '')}-val{fraction:g}.csv"


def divide(source: Source, train: str, *, holdout: float, holdout_rule: str, fraction: float) -> tuple[Split, Split | None]:
    """Return the images of a split to train on, and those of it that are held out, if any."""
    chosen, held_out = source.split(train), None
    if holdout:
        check_rule(holdout_rule, "data.holdout_rule")
        positions = _chosen(chosen, holdout, holdout_rule)
        held_out = rename(chosen.subset(positions), "holdout")
        chosen = chosen.subset(np.setdiff1d(np.arange(len(chosen)), positions))
    if fraction < 1:
        chosen = chosen.subset(training_part(chosen, fraction))
    return chosen, held_out


def training_part(split: Split, fraction: float) -> Array:
    """Return the positions of a fraction of every class to train on, at least one image of each.

    Not by hash: of label sets and numbers, `lowest_hashes` of a smaller fraction is no part of that of a larger one.
    """
    single = [members for _, members in _strata(split) if len(members) == 1]
    return np.sort(np.concatenate([stratified(split, fraction, seed=0), *single]))


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
    with atomic_file(file) as temporary:
        temporary.write_bytes(to_csv([["path", *header, "split"], *rows]))


def _relative_path(folder: Path, path: str) -> str:
    base, file = folder.resolve(), Path(path).absolute()
    return file.relative_to(base).as_posix() if file.is_relative_to(base) else str(file)


def _labels(split: Split, row: int) -> list[str]:
    if split.task == "classify":
        return [split.classes[split.targets[row]]]
    if split.task == "multilabel":
        return ["|".join(split.classes[k] for k in np.flatnonzero(split.targets[row]))]
    return [repr(float(value)) for value in split.targets[row]]


def _read_older_file(split: Split, split_file: Path) -> tuple[Array, Array]:
    try:
        text = read_bytes(split_file).decode("utf-8", "surrogateescape")
        rows = {row["path"]: row["split"] for row in csv.DictReader(io.StringIO(text, newline=""))}
    except (OSError, KeyError, csv.Error) as error:
        reason = f"it has no column {error}" if isinstance(error, KeyError) else error
        raise VitrailError(
            f"{split_file} cannot be read as a table of path and split ({reason}). An older version divided the images by this "
            "file. Restore it, or delete it."
        ) from error
    position = {split.image_name(k): k for k in range(len(split))}
    missing = [name for name in rows if name not in position]
    if missing:
        raise VitrailError(
            f"{split_file} lists {counted(len(missing), 'image')} that cannot be found, for example {missing[0]}. "
            "An older version divided the images by this file. Restore the missing images, or delete this file."
        )
    new = len(position) - len(rows)
    if new:
        skipped = counted(new, "image")
        log.warning("Skipped %s not listed in %s, by which an older version divided the images.", skipped, split_file)
    parts = {part: [position[name] for name, assigned in rows.items() if assigned == part] for part in ("train", "val")}
    return np.sort(np.array(parts["train"], np.int64)), np.sort(np.array(parts["val"], np.int64))
