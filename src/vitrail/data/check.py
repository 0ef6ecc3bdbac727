"""Check every image of a source before training: what it contains, and what is wrong with it."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.classes import split_name
from vitrail.data.decode import ImageHeader, decode, image_header, open_image, unwrap_npy
from vitrail.data.duplicates import exact_pairs, fingerprints, near_pairs
from vitrail.data.settings import Duplicates
from vitrail.data.sources.layout import stray_files, subfolders
from vitrail.data.sources.packed_files import checksum_errors, read_description
from vitrail.data.sources.reference import parse_reference
from vitrail.data.types import Array, BadImage, Source, Split
from vitrail.errors import counted

Progress = Callable[[int], None]
_BLOCK = 2048


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem: a message, and the images concerned."""

    kind: str
    message: str
    items: tuple[str, ...] = ()


@dataclass(kw_only=True)
class SplitReport:
    """What one split contains."""

    images: int
    per_class: dict[str, int]
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of images per (height, width), after EXIF rotation."""
    modes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    rotated: int = 0
    """Number of images with an EXIF orientation other than upright."""


@dataclass(kw_only=True)
class Report:
    """The result of `vitrail data check`."""

    source: str
    splits: dict[str, SplitReport]
    problems: list[Problem]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "source": self.source,
            "splits": {name: _split_dict(part) for name, part in self.splits.items()},
            "problems": [
                {"kind": problem.kind, "message": problem.message, "items": list(problem.items)} for problem in self.problems
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
class _SplitScan:
    """The result of reading every image of a split. Rows of `digests`, `hashes` and `small` belong to `positions`."""

    split: Split
    report: SplitReport
    bad: list[str]
    tiny: list[str]
    positions: Array
    digests: Array
    hashes: Array
    small: Array


def check(source: Source, *, duplicates: Duplicates = "near", workers: int = 2, progress: Progress = lambda count: None) -> Report:
    """Read and decode every image once. `progress` is called with the number of images done since the last call."""
    scans = [_scan_split(split, workers, progress) for split in source.splits.values()]
    problems = [*_bad_files(source, scans), *_checksum_problems(source)]
    class_problems, notes = _class_problems(source)
    problems += class_problems
    problems += [*_similar_classes(source), *_tiny(scans), *_stray(source)]
    if duplicates != "none":
        for scan in scans:
            conflicts, duplicate_notes = _duplicates_within(scan)
            problems += conflicts
            notes += duplicate_notes
        for first, second in combinations(scans, 2):
            problems += _duplicates_across(first, second, near=duplicates == "near")
    notes += _notes(scans)
    return Report(
        source=source.describe(),
        splits={scan.split.name: scan.report for scan in scans},
        problems=problems,
        notes=notes,
    )


def _scan_split(split: Split, workers: int, progress: Progress) -> _SplitScan:
    counts = np.zeros(len(split.classes), np.int64)
    if split.task == "classify":
        counts = np.bincount(split.targets, minlength=len(split.classes))
    elif split.task == "multilabel":
        counts = split.targets.sum(0).astype(np.int64)
    per_class = dict(zip(split.classes, map(int, counts), strict=True)) if split.task != "regress" else {}
    report = SplitReport(images=len(split), per_class=per_class)
    bad: list[str] = []
    tiny: list[str] = []
    positions, digests = [], []
    prints = [fingerprints(np.empty((0, 32, 32), np.uint8))]
    with ThreadPoolExecutor(workers) as pool:
        indices = iter(range(len(split)))
        while block := list(islice(indices, _BLOCK)):
            thumbnails = []
            for index, result in zip(block, pool.map(lambda k: _scan_image(split, k), block), strict=True):
                if isinstance(result, BadImage):
                    bad.append(f"{split.image_name(index)}: {result.reason}")
                    continue
                header, digest, thumbnail = result
                if min(header.height, header.width) == 1:
                    tiny.append(f"{split.image_name(index)}: {header.height}×{header.width} pixels")
                report.sizes[header.height, header.width] += 1
                report.modes[f"{header.mode}, {header.bits} bits" if header.bits != 8 else header.mode] += 1
                report.formats[header.format] += 1
                report.rotated += header.orientation != 1
                positions.append(index)
                digests.append(digest)
                thumbnails.append(thumbnail)
            if thumbnails:
                prints.append(fingerprints(np.stack(thumbnails)))
            progress(len(block))
    hashes, small = (np.concatenate(parts) for parts in zip(*prints, strict=True))
    return _SplitScan(split, report, bad, tiny, np.array(positions, np.int64), np.array(digests, "S16"), hashes, small)


def _scan_image(split: Split, index: int) -> tuple[ImageHeader, bytes, Array] | BadImage:
    name = split.image_name(index)
    try:
        payload = unwrap_npy(split.payload(index), name=name)
        if isinstance(payload, bytes):
            image, header = open_image(payload, name=name)
            # Decoding at the smallest scale still reads the whole file, so a truncated one is found.
            pixels = decode(image, channels=3, min_size=(64, 64), exif=False, name=name)
            content = payload
        else:
            header = image_header(payload, name=name)
            pixels = decode(payload, channels=payload.shape[2] if payload.ndim == 3 else 1, name=name)[:, :, :3]
            content = np.ascontiguousarray(payload).tobytes()
    except BadImage as error:
        return error
    # numpy strips trailing zero bytes from fixed-length strings, so store the digest as hex.
    digest = hashlib.blake2b(content, digest_size=8).hexdigest().encode()
    grey = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]).convert("L")
    return header, digest, np.asarray(grey.resize((32, 32), Image.Resampling.BOX))


def _bad_files(source: Source, scans: Iterable[_SplitScan]) -> Iterable[Problem]:
    for kind, noun, state in (
        ("missing", "listed image", "not found."),
        ("special-file", "image", "skipped: not a regular file."),
        ("unreadable", "image", "skipped: cannot be used."),
    ):
        items = tuple(f"{bad.name}: {bad.reason}" for bad in source.skipped if bad.kind == kind)
        if items:
            yield Problem(kind=kind, message=f"{counted(len(items), noun)} {state}", items=items)
    for scan in scans:
        if scan.bad:
            yield Problem(
                kind="unreadable",
                message=f"{scan.split.name}: {len(scan.bad)} of {counted(len(scan.split), 'image')} cannot be used.",
                items=tuple(scan.bad),
            )


def _checksum_problems(source: Source) -> list[Problem]:
    if source.kind != "packed":
        return []
    folder = Path(parse_reference(source.reference)[1]).expanduser()
    errors = tuple(checksum_errors(folder, read_description(folder)))
    message = f"{counted(len(errors), 'part')} of the packed dataset corrupted. Pack it again."
    return [Problem(kind="checksum", message=message, items=errors)] if errors else []


def _class_problems(source: Source) -> tuple[list[Problem], list[str]]:
    """Find classes without images: a problem in the training split, a note in others."""
    problems, notes = [], []
    for k, split in enumerate(source.splits.values()):
        if split.task not in ("classify", "multilabel"):
            continue
        used = set((np.unique(split.targets) if split.task == "classify" else np.flatnonzero(split.targets.any(0))).tolist())
        empty = tuple(name for label, name in enumerate(split.classes) if label not in used)
        message = f"{split.name} has no image of {len(empty)} of {counted(len(split.classes), 'class', 'classes')}"
        if empty and k == 0:
            problems.append(Problem(kind="empty-class", message=f"{message}.", items=empty))
        elif empty:
            notes.append(f"{message}: {', '.join(empty[:8])}{', …' * (len(empty) > 8)}.")
    first = next(iter(source.splits.values()))
    if source.task == "classify" and len(first) and len(np.unique(first.targets)) < 2:
        only = source.classes[int(first.targets[0])]
        message = f"{first.name} has images of only one class, {only!r}, so there is nothing to classify."
        problems.append(Problem(kind="one-class", message=message))
    return problems, notes


def _similar_classes(source: Source) -> Iterable[Problem]:
    """Find classes that are probably one: some file systems and editors change case or Unicode normalisation."""
    if source.task not in ("classify", "multilabel"):
        return
    groups: dict[str, list[str]] = {}
    for name in source.classes:
        groups.setdefault(unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()), []).append(name)
    similar = [names for names in groups.values() if len(names) > 1]
    if similar:
        yield Problem(
            kind="similar-classes",
            message=f"{counted(len(similar), 'group')} of classes that differ only by case or Unicode normalisation.",
            items=tuple(" ~ ".join(f"{name} ({name!a})" if not name.isascii() else name for name in names) for names in similar),
        )


def _tiny(scans: Iterable[_SplitScan]) -> Iterable[Problem]:
    for scan in scans:
        if scan.tiny:
            message = f"{scan.split.name}: {counted(len(scan.tiny), 'image')} with a side of 1 pixel."
            yield Problem(kind="tiny", message=message, items=tuple(scan.tiny))


def _stray(source: Source) -> Iterable[Problem]:
    """Find files in the folders of a dataset that are not images, such as photos in a format that is not read."""
    root = Path(parse_reference(source.reference)[1]).expanduser()
    if source.kind != "folder" or not root.is_dir():
        return
    parts = [name for name in subfolders(root) if split_name(name) is not None]
    found = [f"{name}/{file}" for name in parts or subfolders(root) for file in stray_files(root / name)]
    if found:
        message = f"{counted(len(found), 'file is not an image', 'files are not images')} of a supported format, and not used."
        yield Problem(kind="stray-files", message=message, items=tuple(found))


def _duplicates_within(scan: _SplitScan) -> tuple[list[Problem], list[str]]:
    """Find identical images within a split: a problem if their labels differ, else a note."""
    _, inverse, counts = np.unique(scan.digests, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse] > 1)
    if not len(repeated):
        return [], []
    groups: dict[int, list[int]] = {}
    for row in repeated:
        groups.setdefault(int(inverse[row]), []).append(int(scan.positions[row]))
    named = [" = ".join(scan.split.image_name(k) for k in members[:4]) for members in groups.values()]
    conflicting = [
        text
        for text, members in zip(named, groups.values(), strict=True)
        if len(np.unique(scan.split.targets[members], axis=0)) > 1
    ]
    note = f"{scan.split.name}: {len(repeated)} identical images in {counted(len(groups), 'group')}, for example {named[0]}."
    if not conflicting:
        return [], [note]
    message = f"{scan.split.name}: {counted(len(conflicting), 'group')} of identical images with different labels."
    return [Problem(kind="conflicting-labels", message=message, items=tuple(conflicting))], [note]


def _duplicates_across(first: _SplitScan, second: _SplitScan, *, near: bool) -> list[Problem]:
    found = []
    exact = exact_pairs(first.digests, second.digests)
    if len(exact):
        found.append(_leak("duplicates", "also in", first, second, exact))
    if near and all(_large_enough(scan) for scan in (first, second)):
        pairs = near_pairs((first.hashes, first.small), (second.hashes, second.small))
        pairs = pairs[first.digests[pairs[:, 0]] != second.digests[pairs[:, 1]]]
        if len(pairs):
            found.append(_leak("near-duplicates", "nearly identical to one in", first, second, pairs))
    return found


def _large_enough(scan: _SplitScan) -> bool:
    """Whether near-duplicates can be found: below 16 pixels per side, different images are often equal except for noise."""
    return any(min(size) >= 16 for size in scan.report.sizes)


def _leak(kind: str, relation: str, first: _SplitScan, second: _SplitScan, pairs: Array) -> Problem:
    images = len(np.unique(pairs[:, 1]))
    names = tuple(
        f"{first.split.image_name(int(first.positions[a]))} ~ {second.split.image_name(int(second.positions[b]))}" for a, b in pairs
    )
    subject = counted(images, f"image of {second.split.name} is", f"images of {second.split.name} are")
    message = f"{subject} {relation} {first.split.name}"
    if first.split.task == second.split.task == "classify":
        labels = (scan.split.targets[scan.positions[rows]] for scan, rows in ((first, pairs[:, 0]), (second, pairs[:, 1])))
        different = int(np.not_equal(*labels).sum())
        message += f"; {different} of {counted(len(pairs), 'pair')} with different labels" if different else ""
    return Problem(kind=kind, message=f"{message}.", items=names)


def _notes(scans: list[_SplitScan]) -> list[str]:
    notes = []
    for scan in scans:
        counts = [count for count in scan.report.per_class.values() if count]
        if counts and max(counts) >= 10 * min(counts):
            notes.append(f"{scan.split.name}: the largest class has {counted(max(counts), 'image')}, the smallest {min(counts)}.")
        if len(scan.report.modes) > 1:
            modes = ", ".join(f"{mode} {count:,}" for mode, count in scan.report.modes.most_common())
            notes.append(f"{scan.split.name}: images have different modes: {modes}.")
        if scan.report.rotated:
            notes.append(f"{scan.split.name}: {counted(scan.report.rotated, 'image')} rotated by EXIF orientation.")
    return notes
