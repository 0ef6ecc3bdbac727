"""Looking at every image of a source before hours are spent on it: what is there, and what is wrong with it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any, Literal

import numpy as np
from PIL import Image

from vitrail.data import duplicates
from vitrail.data.decode import ImageHeader, decode, image_header, open_image, unwrapped
from vitrail.data.types import Array, BadImage, Source, Split, counted

Progress = Callable[[int], None]
Duplicates = Literal["near", "exact", "none"]
_BLOCK = 2048


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: a sentence, and the images it is about."""

    kind: str
    sentence: str
    items: tuple[str, ...] = ()


@dataclass(kw_only=True)
class SplitReport:
    """What one split holds."""

    images: int
    per_class: dict[str, int]
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(height, width) of the upright images."""
    modes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    rotated: int = 0
    """Images whose EXIF orientation is not upright."""


@dataclass(kw_only=True)
class Report:
    """Everything `vitrail data check` found."""

    source: str
    splits: dict[str, SplitReport]
    problems: list[Problem]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "source": self.source,
            "splits": {name: _split_dict(part) for name, part in self.splits.items()},
            "problems": [
                {"kind": problem.kind, "sentence": problem.sentence, "items": list(problem.items)} for problem in self.problems
            ],
            "notes": self.notes,
        }


def _split_dict(part: SplitReport) -> dict[str, Any]:
    return {
        "images": part.images,
        "per_class": part.per_class,
        "sizes": {f"{height}x{width}": count for (height, width), count in part.sizes.most_common()},
        "modes": dict(part.modes.most_common()),
        "formats": dict(part.formats.most_common()),
        "rotated": part.rotated,
    }


@dataclass
class _Looked:
    """One split after every image was looked at. Rows of `digests`, `hashes` and `small` belong to `positions`."""

    split: Split
    report: SplitReport
    bad: list[str]
    positions: Array
    digests: Array
    hashes: Array
    small: Array


def check(source: Source, *, copies: Duplicates = "near", workers: int = 2, progress: Progress = lambda count: None) -> Report:
    """Read and decode every image once. `progress` is told how many more have been looked at."""
    looked = [_look(split, workers, progress) for split in source.splits.values()]
    problems = list(_faulty_files(source, looked))
    of_classes, notes = _class_problems(source)
    problems += of_classes
    if copies != "none":
        for one in looked:
            within, note = _within(one)
            problems += within
            notes += note
        for first, second in combinations(looked, 2):
            problems += _across(first, second, near=copies == "near")
    notes += _remarks(looked)
    return Report(
        source=source.describe(),
        splits={one.split.name: one.report for one in looked},
        problems=problems,
        notes=notes,
    )


def _look(split: Split, workers: int, progress: Progress) -> _Looked:
    counts = np.zeros(len(split.classes), np.int64)
    if split.task == "classify":
        counts = np.bincount(split.targets, minlength=len(split.classes))
    elif split.task == "multilabel":
        counts = split.targets.sum(0).astype(np.int64)
    per_class = dict(zip(split.classes, map(int, counts), strict=True)) if split.task != "regress" else {}
    report = SplitReport(images=len(split), per_class=per_class)
    bad: list[str] = []
    positions, digests = [], []
    prints = [duplicates.fingerprints(np.empty((0, 32, 32), np.uint8))]
    with ThreadPoolExecutor(workers) as pool:
        numbers = iter(range(len(split)))
        while block := list(islice(numbers, _BLOCK)):
            thumbnails = []
            for index, seen in zip(block, pool.map(lambda k: _look_at(split, k), block), strict=True):
                if isinstance(seen, BadImage):
                    bad.append(f"{split.image_name(index)}: {seen.fault}")
                    continue
                header, digest, thumbnail = seen
                report.sizes[header.height, header.width] += 1
                report.modes[f"{header.mode}, {header.bits} bits" if header.bits != 8 else header.mode] += 1
                report.formats[header.format] += 1
                report.rotated += header.orientation != 1
                positions.append(index)
                digests.append(digest)
                thumbnails.append(thumbnail)
            if thumbnails:
                prints.append(duplicates.fingerprints(np.stack(thumbnails)))
            progress(len(block))
    hashes, small = (np.concatenate(parts) for parts in zip(*prints, strict=True))
    return _Looked(split, report, bad, np.array(positions, np.int64), np.array(digests, "S16"), hashes, small)


def _look_at(split: Split, index: int) -> tuple[ImageHeader, bytes, Array] | BadImage:
    name = split.image_name(index)
    try:
        payload = unwrapped(split.payload(index), name=name)
        if isinstance(payload, bytes):
            image, header = open_image(payload, name=name)
            # The coarsest scale still reads the file to its end, so what is truncated is found.
            pixels = decode(image, channels=3, cover=(64, 64), exif=False, name=name)
            content = payload
        else:
            header = image_header(payload, name=name)
            pixels = decode(payload, channels=payload.shape[2] if payload.ndim == 3 else 1, name=name)[:, :, :3]
            content = np.ascontiguousarray(payload).tobytes()
    except BadImage as fault:
        return fault
    # Trailing zero bytes vanish from numpy's fixed-length strings, so the digest is kept as text.
    digest = hashlib.blake2b(content, digest_size=8).hexdigest().encode()
    grey = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]).convert("L")
    return header, digest, np.asarray(grey.resize((32, 32), Image.Resampling.BOX))


def _faulty_files(source: Source, looked: Iterable[_Looked]) -> Iterable[Problem]:
    if source.left_out:
        yield Problem(
            kind="missing",
            sentence=f"{counted(len(source.left_out), 'image')} named but not there.",
            items=tuple(f"{fault.name}: {fault.fault}" for fault in source.left_out),
        )
    for one in looked:
        if one.bad:
            yield Problem(
                kind="unreadable",
                sentence=f"{one.split.name}: {len(one.bad)} of {len(one.split)} images cannot be used.",
                items=tuple(one.bad),
            )


def _class_problems(source: Source) -> tuple[list[Problem], list[str]]:
    """A class without images is wrong in the split that is learnt from, and worth knowing in another."""
    problems, notes = [], []
    for place, split in enumerate(source.splits.values()):
        if split.task not in ("classify", "multilabel"):
            continue
        used = set((np.unique(split.targets) if split.task == "classify" else np.flatnonzero(split.targets.any(0))).tolist())
        empty = tuple(name for k, name in enumerate(split.classes) if k not in used)
        sentence = f"{split.name} has no image of {len(empty)} of the {len(split.classes)} classes"
        if empty and place == 0:
            problems.append(Problem(kind="empty-class", sentence=f"{sentence}.", items=empty))
        elif empty:
            notes.append(f"{sentence}: {', '.join(empty[:8])}{', …' * (len(empty) > 8)}.")
    if source.task == "classify" and len(source.classes) < 2:
        problems.append(Problem(kind="one-class", sentence="There is only one class: nothing can be learnt from that."))
    return problems, notes


def _within(one: _Looked) -> tuple[list[Problem], list[str]]:
    """Repeats inside a split: wrong where their labels differ, worth a note otherwise."""
    _, inverse, counts = np.unique(one.digests, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse] > 1)
    if not len(repeated):
        return [], []
    groups: dict[int, list[int]] = {}
    for row in repeated:
        groups.setdefault(int(inverse[row]), []).append(int(one.positions[row]))
    named = [" = ".join(one.split.image_name(k) for k in members[:4]) for members in groups.values()]
    torn = [
        text for text, members in zip(named, groups.values(), strict=True) if len(np.unique(one.split.targets[members], axis=0)) > 1
    ]
    many = counted(len(groups), "group")
    note = f"{one.split.name}: {len(repeated)} images are copies of one another, in {many}, such as {named[0]}."
    if not torn:
        return [], [note]
    sentence = f"{one.split.name}: {counted(len(torn), 'group')} of identical images under different labels."
    return [Problem(kind="conflicting-labels", sentence=sentence, items=tuple(torn))], [note]


def _across(first: _Looked, second: _Looked, *, near: bool) -> list[Problem]:
    found = []
    exact = duplicates.same_content(first.digests, second.digests)
    if len(exact):
        found.append(_leak("duplicates", "also in", first, second, exact))
    if near and all(_fine_enough(one) for one in (first, second)):
        pairs = duplicates.same_picture((first.hashes, first.small), (second.hashes, second.small))
        pairs = pairs[first.digests[pairs[:, 0]] != second.digests[pairs[:, 1]]]
        if len(pairs):
            found.append(_leak("near-duplicates", "nearly the same as one in", first, second, pairs))
    return found


def _fine_enough(one: _Looked) -> bool:
    """Below 16 pixels a side, as in the 8×8 digits, different images are often equal but for noise."""
    return any(min(size) >= 16 for size in one.report.sizes)


def _leak(kind: str, relation: str, first: _Looked, second: _Looked, pairs: Array) -> Problem:
    images = len(np.unique(pairs[:, 1]))
    names = tuple(
        f"{first.split.image_name(int(first.positions[a]))} ~ {second.split.image_name(int(second.positions[b]))}" for a, b in pairs
    )
    sentence = f"{counted(images, 'image')} of {second.split.name} {relation} {first.split.name}"
    if first.split.task == second.split.task == "classify":
        labels = (one.split.targets[one.positions[rows]] for one, rows in ((first, pairs[:, 0]), (second, pairs[:, 1])))
        others = int(np.not_equal(*labels).sum())
        sentence += f", in {others} of {len(pairs)} pairs under another label" if others else ""
    return Problem(kind=kind, sentence=f"{sentence}.", items=names)


def _remarks(looked: list[_Looked]) -> list[str]:
    notes = []
    for one in looked:
        counts = [count for count in one.report.per_class.values() if count]
        if counts and max(counts) >= 10 * min(counts):
            notes.append(f"{one.split.name}: the largest class has {max(counts)} images, the smallest {min(counts)}.")
        if len(one.report.modes) > 1:
            modes = ", ".join(f"{mode} {count:,}" for mode, count in one.report.modes.most_common())
            notes.append(f"{one.split.name}: images differ in kind: {modes}.")
        if one.report.rotated:
            notes.append(f"{one.split.name}: {counted(one.report.rotated, 'image')} turned upright by the EXIF orientation.")
    return notes
