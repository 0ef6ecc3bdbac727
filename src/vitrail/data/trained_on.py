"""Record which images a model was trained on, and find them among the images that it is evaluated on.

A record has the rule by which the training images were chosen, a digest of their names, and the content of a few of them; its size
does not depend on the number of images. Where the same source is opened again, the training images are chosen again by that rule
and compared one by one. A packed copy is compared by names. Any other source is searched for files with the same content as those
whose content was recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.settings import BY_NAME, BadImages
from vitrail.data.sources import open_source, resolve
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.reference import format_reference
from vitrail.data.split import divide, name_hash
from vitrail.data.types import BadImage, PackedStrings, Payload, Source, Split, Subset
from vitrail.errors import VitrailError, counted
from vitrail.regular_files import read_json_object
from vitrail.text import to_bytes

HOLDOUT = "holdout"
"""The split that a run held out of its training images itself (`data.holdout`)."""
_SAMPLE = 64
_CHUNK = 100_000
_MAX_READ = 50_000  # images that are read to compare their contents


@dataclass(frozen=True, kw_only=True)
class TrainedOn:
    """The images that a model was trained on."""

    source: str
    location: str | None = None
    """Digest of where the source is, equal for all ways to write it."""
    train: str = "train"
    rule: str = BY_NAME
    holdout: float = 0.0
    holdout_rule: str = BY_NAME
    fraction: float = 1.0
    validation: str | None = None
    """The split on which the run validated, where it is one of the source's or `HOLDOUT`."""
    images: int
    names: str | None = None
    """Digest of the names of the images."""
    sample: str = ""
    """Of a few images: hash of class and name, hash and length of the content. (Older records have no lengths.)"""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Any) -> TrainedOn:
        """Invert `to_dict`; fields of a newer version are left out, and corrupted ones refused."""
        if isinstance(values, Mapping) and "holdout_seed" in values:  # of an older version
            values = {"holdout_rule": f"seed-{values['holdout_seed']}", **values}
        sound = isinstance(values, Mapping) and values.keys() >= _REQUIRED
        known = {name: values[name] for name in _KINDS if name in values} if sound else {}
        sound = sound and all(isinstance(value, _KINDS[name]) for name, value in known.items())
        words = known.get("sample", "").split() if sound else ()
        sound = sound and all(0 <= known.get(name, 0.5) <= 1 for name in ("holdout", "fraction"))
        if not sound or not all(re.fullmatch("[0-9a-f]{32}([0-9a-f]{16})?", word) for word in words):
            raise VitrailError(
                "The record of what this checkpoint was trained on is corrupted. Download or copy the checkpoint again."
            )
        return TrainedOn(**known)

    def divide(self, source: Source) -> tuple[Split, Split | None]:
        """Choose the training images again, and those held out of them."""
        return divide(source, self.train, holdout=self.holdout, holdout_rule=self.holdout_rule, fraction=self.fraction)


_REQUIRED = {"source", "images"}
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("source", "train", "rule", "holdout_rule", "sample"), str),
    **dict.fromkeys(("location", "names", "validation"), str | None),
    **dict.fromkeys(("holdout", "fraction"), float | int),
    "images": int,
}


def record(source: Source, split: Split, /, **chosen: Any) -> TrainedOn:
    """Record the images to train on; `chosen` are the settings by which they were chosen."""
    return TrainedOn(
        source=source.reference,
        location=location_of(source.reference),
        rule=source.rule or BY_NAME,
        images=len(split),
        names=names_digest(split),
        sample=_sample(split),
        **chosen,
    )


def record_split(source: str, split: Split) -> TrainedOn:
    """Record images that were not opened by a reference; they are found again by their content."""
    return TrainedOn(source=source, train=split.name, images=len(split), names=names_digest(split), sample=_sample(split))


def records_in(provenance: Mapping[str, Any], reference: str) -> tuple[TrainedOn, ...]:
    """Return what a checkpoint was trained on, from what is stored with it or, for older ones, with its run."""
    recorded = provenance.get("trained_on")
    if isinstance(recorded, list):
        return tuple(TrainedOn.from_dict(one) for one in recorded)
    return _of_older_run(reference)


def _of_older_run(reference: str) -> tuple[TrainedOn, ...]:
    """Read from the settings of a run of an older version what it was trained on; empty if this is not a run."""
    path = Path(reference).expanduser()
    folder = path.parent if path.name in ("model", "model-best", "model-last") else path
    try:
        config = read_json_object(folder / "config.json")
        recipe, data, images = config["recipe"], config["recipe"]["data"], config["resolved"]["images"]
        seed = recipe.get("seed", 0)
        names = ("source", "train", "holdout", "fraction")
        chosen = {name: data[name] for name in names if name in data}
        by_seed = f"seed-{data.get('holdout_seed', seed)}"
        chosen |= {"rule": data.get("split_rule", f"seed-{seed}"), "holdout_rule": data.get("holdout_rule", by_seed)}
        return (TrainedOn.from_dict({**chosen, "images": images}),)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()


def location_of(reference: str) -> str | None:
    """Return a digest that is equal for all references to one folder, table or dataset; None if it cannot be found."""
    try:
        kind, location, options = resolve(reference)
    except VitrailError:
        return None
    if kind == "wds":
        location = json.dumps([location, options], sort_keys=True)
    elif kind in ("folder", "csv", "packed") or (kind == "hf" and location.endswith(".parquet")):
        location = os.path.realpath(Path(location).expanduser())
    elif kind == "torchvision":
        location = location.casefold()
    return _location(kind, location)


def _location(kind: str, location: str) -> str:
    return hashlib.sha256(to_bytes(f"{kind}:{location}")).hexdigest()[:16]


def names_digest(split: Split) -> str:
    """Return a digest of the names of all images. It is computed for 14 million images when a run starts, so without a loop."""
    base, indices = _base(split)
    names = base.packed_names
    if names is None:
        names = PackedStrings(split.image_name(k) for k in range(len(split)))
        indices = np.arange(len(split))
    digest, (block, ends) = hashlib.sha256(), names.to_arrays()
    chosen = np.zeros(len(names), bool)
    chosen[indices] = True
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    for first in range(0, len(names), _CHUNK):
        rows = slice(first, first + _CHUNK)
        lengths = ends[rows] - starts[rows]
        digest.update(block[starts[rows][0] : ends[rows][-1]][np.repeat(chosen[rows], lengths)].tobytes())
        digest.update(lengths[chosen[rows]].tobytes())
    return digest.hexdigest()[:32]


def open_for(
    records: Sequence[TrainedOn],
    reference: str,
    *,
    classes: tuple[str, ...] | None = None,
    bad_images: BadImages = "error",
    ignore_unknown: bool = False,
) -> Source:
    """Open a source to evaluate a model on, divided as it was for training if it is one that the model was trained on."""
    own = next((one for one in records if _is_same(one, reference)), None)
    rule = BY_NAME if own is None else own.rule
    source = open_source(reference, classes=classes, rule=rule, bad_images=bad_images, ignore_unknown=ignore_unknown)
    if own is not None and own.holdout and own.train in source.splits and HOLDOUT not in source.splits:
        held_out = own.divide(source)[1]
        assert held_out is not None
        return dataclasses.replace(source, splits={**source.splits, HOLDOUT: held_out})
    return source


def evaluation_split(records: Sequence[TrainedOn], source: Source, name: str | None) -> Split:
    """Return the split of this name; default: the one on which the run validated, else val, else test, else the first."""
    if name is None:
        own = next((one for one in records if _is_same(one, source.reference)), None)
        names = (own.validation if own is not None else None, "val", "test", HOLDOUT)
        name = next((one for one in names if one in source.splits), next(iter(source.splits)))
    assert name is not None
    return source.split(name)


@dataclass(frozen=True)
class Overlap:
    """How many of the images to evaluate on were trained on."""

    images: int
    """Images known to have been trained on."""
    exact: bool
    """Whether there are no more: otherwise only some contents were recorded, or several trainings had some of these images."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"images": self.images, "exact": self.exact}


def overlap(records: Sequence[TrainedOn], source: Source, split: Split) -> Overlap | None:
    """Compare the images of a split with those that a model was trained on. `notes` are sentences for the user.

    None: it is not known what the model was trained on.
    """
    if not records:
        return None
    found = [_overlap(one, source, split) for one in records]
    notes = tuple(note for one in found for note in one.notes)
    most = max(one.images for one in found)
    several = sum(one.images > 0 for one in found) > 1 and most < len(split)  # each may have had other images
    return Overlap(most, all(one.exact for one in found) and not several, notes)


def _overlap(known: TrainedOn, source: Source, split: Split) -> Overlap:
    if _is_same(known, source.reference):
        return _in_same_source(known, source, split)
    if _is_packed_from(known, source):
        return _in_packed_copy(known, source, split)
    root = _folder_of(known, split)
    if root is not None:
        trained = _trained_images(known, "folder", str(root))
        if trained is not None:
            paths = set(_real_paths(trained))
            return _exact(known, sum(path in paths for path in _real_paths(split)), len(split))
    return _by_content(known, split)


def _in_same_source(known: TrainedOn, source: Source, split: Split) -> Overlap:
    kind, location, options = resolve(source.reference)
    same_options = source.reference == known.source or options == _options(known)
    same_rule = source.rule is None or source.rule == known.rule
    if same_options and same_rule:
        trained: Split | None = known.divide(source)[0] if known.train in source.splits else None
    else:
        trained = _trained_images(known, kind, location)
    if trained is None:
        return _by_content(known, split)
    notes: tuple[str, ...] = ()
    if known.images != len(trained) or known.names not in (None, names_digest(trained)):
        notes = (
            f"{known.source} has changed since training, which had {counted(known.images, 'image')} of it; "
            f"by the same rule it would now have {len(trained):,}. Images that moved may have been trained on.",
        )
    found = _exact(known, _num_common(trained, split, own_splits=source.rule is None), len(split))
    if notes and not found.images:
        found = _by_content(known, split)
    elif not found.images and source.rule is None and isinstance(_base(split)[0], FileSplit):
        copies = _by_content(known, split)  # a folder or table with splits of its own may have a copy of a file in two of them
        found = copies if copies.images else found
    return dataclasses.replace(found, notes=(*found.notes, *notes))


def _num_common(trained: Split, split: Split, *, own_splits: bool) -> int:
    """Count the images of `split` that are in `trained`, of the same source."""
    (other, theirs), (base, indices) = _base(trained), _base(split)
    files = isinstance(other, FileSplit) and isinstance(base, FileSplit)
    same = len(np.intersect1d(theirs, indices)) if other is base else 0
    if files and (own_splits or other is not base):  # a table can list a file in two splits, and a file can be a link to another
        paths = set(_real_paths(trained, links=not own_splits))
        return max(same, sum(path in paths for path in _real_paths(split)))
    if other is base:
        return same
    if own_splits and split.name not in (trained.name, HOLDOUT):  # stored apart: a name in both is not the same image
        return 0
    names = {trained.image_name(k) for k in range(len(trained))}
    return sum(split.image_name(k) in names for k in range(len(split)))


def _is_packed_from(known: TrainedOn, source: Source) -> bool:
    return source.kind == "packed" and source.made_from is not None and _is_same(known, source.made_from)


def _in_packed_copy(known: TrainedOn, source: Source, split: Split) -> Overlap:
    """Search a packed copy of the source by names, which it keeps: its contents are other ones."""
    assert source.made_from is not None
    kind, location, _ = resolve(source.made_from)
    trained = _trained_images(known, kind, location)
    if trained is not None:
        names = {trained.image_name(k) for k in range(len(trained))}
        return _exact(known, sum(split.image_name(k) in names for k in range(len(split))), len(split))
    hashes = {int(word[:16], 16) for word in known.sample.split()}
    return _some(known, len(hashes & {name_hash(split, k) for k in range(len(split))}), len(hashes), split, "name")


def _exact(known: TrainedOn, count: int, total: int) -> Overlap:
    if not count:
        return Overlap(0, True)
    which = "all" if count == total else f"{count:,}"
    note = (
        f"trained on: {which} of these {counted(total, 'image')} were among the training images of this model ({known.source}), "
        "so the result does not show how well it does on new images."
    )
    return Overlap(count, True, (note,))


def _by_content(known: TrainedOn, split: Split) -> Overlap:
    """Search a split for the images whose content was recorded, under any name and class."""
    words = known.sample.split()
    contents = {word[16:32] for word in words}
    found = {_content(split, k) for k in _candidates(words, split)} & contents
    return _some(known, len(found), len(contents), split, "content")


def _candidates(words: Sequence[str], split: Split) -> Sequence[int]:
    """Return the positions of images that may have a recorded content: of files, those of the same length."""
    base, indices = _base(split)
    if not words or not all(len(word) == 48 for word in words):
        candidates: Sequence[int] = range(0)
    elif isinstance(base, FileSplit):
        lengths = {int(word[32:], 16) for word in words}
        candidates = [k for k, index in enumerate(indices) if _length(base.path(int(index))) in lengths]
    else:
        candidates = range(len(split))
    if words and (len(candidates) > _MAX_READ or len(words[0]) == 32):  # too many to read: only those of the same name
        names = {int(word[:16], 16) for word in words}
        candidates = [k for k in range(len(split)) if name_hash(split, k) in names][:_MAX_READ]
    return candidates


def _length(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - a million Path objects take seconds
    except (OSError, ValueError):
        return -1


def _some(known: TrainedOn, found: int, looked_for: int, split: Split, same: str) -> Overlap:
    if not found:
        return Overlap(0, False)
    note = (
        f"trained on: {found} of {counted(looked_for, 'training image')} that were looked for ({known.source}) are among these "
        f"{counted(len(split), 'image')}, with the same {same}, so the result does not show how well the model does on new images."
    )
    return Overlap(found, False, (note,))


def _trained_images(known: TrainedOn, kind: str, location: str) -> Split | None:
    """Open the source of a record where it is found now, with the options of then, and choose its training images."""
    try:
        source = open_source(format_reference(kind, location, _options(known)), rule=known.rule, bad_images="skip")
        return known.divide(source)[0]
    except VitrailError:
        return None


def _options(known: TrainedOn) -> dict[str, str]:
    try:
        return resolve(known.source)[2]
    except VitrailError:  # it is not there any more, or somewhere else
        _, mark, tail = known.source.rpartition("?")
        return dict(part.partition("=")[::2] for part in tail.split("&")) if mark and "=" in tail else {}


def _is_same(known: TrainedOn, reference: str) -> bool:
    location = location_of(reference)
    return location is not None and location == (known.location or location_of(known.source))


def _folder_of(known: TrainedOn, split: Split) -> Path | None:
    """Return the folder that a record is of, if files of the split lie in it."""
    base, indices = _base(split)
    if not isinstance(base, FileSplit):
        return None
    location = known.location or location_of(known.source)
    for folder in {os.path.dirname(base.path(int(k))) for k in indices}:  # noqa: PTH120 - a million Path objects take seconds
        real = Path(os.path.realpath(folder))
        for parent in (real, *real.parents):
            if _location("folder", str(parent)) == location:
                return parent
    return None


def _real_paths(split: Split, *, links: bool = True) -> Iterator[str]:
    """Yield the paths of files without links. `links=False` looks only for linked folders, not at each of a million files."""
    base, indices = _base(split)
    assert isinstance(base, FileSplit)
    folders: dict[str, str] = {}
    for index in indices:
        folder, name = os.path.split(base.path(int(index)))
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        path = f"{folders[folder]}/{name}"
        yield os.path.realpath(path) if links and os.path.islink(path) else path  # noqa: PTH114 - a million Path objects take seconds


def _base(split: Split) -> tuple[Split, Any]:
    return (split.parent, split.indices) if isinstance(split, Subset) else (split, np.arange(len(split)))


def _sample(split: Split) -> str:
    positions = np.unique(np.linspace(0, max(len(split) - 1, 0), _SAMPLE).astype(int)) if len(split) else ()
    words = []
    for k in positions:
        try:
            payload = split.payload(int(k))
        except BadImage:
            continue
        length = len(payload) if isinstance(payload, bytes) else payload.nbytes
        words.append(f"{name_hash(split, int(k)):016x}{_hash_content(payload)}{length:016x}")
    return " ".join(words)


def _content(split: Split, index: int) -> str | None:
    try:
        return _hash_content(split.payload(index))
    except BadImage:
        return None


def _hash_content(payload: Payload) -> str:
    content = payload if isinstance(payload, bytes) else str(payload.shape).encode() + np.ascontiguousarray(payload).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
