"""The files of a packed dataset: read and check their description, index and checksums before anything is mapped."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail.data.sources.labels import TASKS
from vitrail.data.types import Array
from vitrail.errors import VitrailError, counted
from vitrail.npy import read_npz
from vitrail.regular_files import open_regular, parse_json, read_bytes

FORMAT, VERSION = "vitrail-packed", 2
_MAX_INDEX = 1 << 34


def read_description(folder: Path) -> dict[str, Any]:
    """Read the description of a packed dataset; check all its values, and that its files have the sizes stored there."""
    unfinished = folder.with_name(f"{folder.name}.partial")
    if not (folder / "packed.json").exists():
        hint = (
            f" {unfinished} is unfinished: run the same `vitrail data pack` again to resume."
            if unfinished.exists()
            else f" Create one with `vitrail data pack SOURCE {folder}`."
        )
        raise VitrailError(f"{folder} is not a packed dataset: it has no packed.json.{hint}")
    try:
        description = parse_json(read_bytes(folder / "packed.json"))
    except (OSError, ValueError) as error:
        raise VitrailError(f"{folder / 'packed.json'} is corrupted ({error}). Pack the dataset again.") from error
    if isinstance(description, dict) and (description.get("format"), description.get("version")) not in (
        (FORMAT, 1),
        (FORMAT, VERSION),
    ):
        raise VitrailError(
            f"{folder} is {str(description.get('format'))[:40]} version {str(description.get('version'))[:40]}, but this Vitrail "
            f"reads {FORMAT} version {VERSION}. Pack the dataset again, or use the version of Vitrail that wrote it."
        )
    description = upgrade(description)
    problem = description_problem(description)
    if problem:
        raise VitrailError(f"{folder / 'packed.json'} is corrupted: {problem}. Pack the dataset again.")
    for part in description["splits"].values():
        check_size(folder / part["images"], part["bytes"])
        check_size(folder / part["index"], part["index_bytes"])
    return dict(description)


def check_size(file: Path, expected: int) -> None:
    """Raise an error unless `file` is a regular file of this size: reading a map beyond the end of its file kills the process."""
    try:
        handle = open_regular(file)
    except FileNotFoundError:
        state = "is missing"
    except OSError as error:
        state = f"cannot be read ({error.strerror})"
    else:
        found = os.fstat(handle).st_size
        os.close(handle)
        if found == expected:
            return
        state = f"has {counted(found, 'byte')}, but {expected:,} are expected"
    raise VitrailError(f"{file} {state}. Pack the dataset again.")


def upgrade(description: Any) -> Any:
    """Convert a description of version 1 to the current names; return any other unchanged.

    Version 1 called the chunks `stretches` and the skipped images `left_out`.
    """
    if not isinstance(description, dict) or description.get("version") != 1 or not _is_dict_of_dicts(description.get("splits")):
        return description
    renamed = {"stretches": "chunks", "left_out": "skipped"}
    splits = {name: {renamed.get(key, key): value for key, value in part.items()} for name, part in description["splits"].items()}
    return {**{renamed.get(key, key): value for key, value in description.items()}, "version": VERSION, "splits": splits}


def description_problem(description: Any) -> str | None:
    """Return what is wrong with a description, or None."""
    if not isinstance(description, dict):
        return "it is not a JSON object"
    if description.get("task") not in TASKS:
        return f"its task is {str(description.get('task'))[:40]!r}, not one of {', '.join(TASKS)}"
    classes: Any = description.get("classes")
    if not _is_list_of(classes, str) or len(set(classes)) != len(classes):
        return "its classes are not a list of different names"
    if not isinstance(description.get("made_from"), str) or not isinstance(description.get("packing"), dict):
        return "its source or its settings are missing"
    if not _is_list_of(description.get("skipped"), list):
        return "its skipped images are not a list"
    splits = description.get("splits")
    if not _is_dict_of_dicts(splits) or not splits:
        return "its splits are missing"
    for name, part in splits.items():
        problem = _part_problem(part)
        if problem:
            return f"split {name[:40]!r}: {problem}"
    files = [part[key] for part in splits.values() for key in ("images", "index")]
    return "a file belongs to two splits" if len(set(files)) != len(files) else None


def _part_problem(part: dict[str, Any]) -> str | None:
    for key in ("count", "bytes", "index_bytes"):
        if not _is_count(part.get(key)):
            return f"{key} is not a whole number from 0"
    for key in ("images", "index"):
        name = part.get(key)
        if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0:") or len(name) > 255:
            return f"{key} is not the name of a file in this folder"
    if "shape" not in part:
        return "its shape is missing"
    shape: Any = part["shape"]
    chunks: Any = part.get("chunks")
    if part.get("dtype") not in ("uint8", "uint16"):
        return "its dtype is neither uint8 nor uint16"
    if shape is not None:
        if not isinstance(shape, list) or len(shape) != 3 or not all(_is_count(side) and side for side in shape):
            return "its shape is not [height, width, channels]"
        expected = part["count"] * math.prod(shape) * np.dtype(part["dtype"]).itemsize
        if part["bytes"] != expected:
            return f"{counted(part['count'], 'image')} of shape {shape} need {expected:,} bytes, but it says {part['bytes']:,}"
    if not isinstance(part.get("index_sha256"), str) or not _is_list_of(chunks, list):
        return "its checksums are missing"
    ends = [0]
    for chunk in chunks:
        if len(chunk) != 2 or not _is_count(chunk[0]) or not isinstance(chunk[1], str) or chunk[0] < ends[-1]:
            return "a chunk is not an end and a checksum, in ascending order"
        ends.append(chunk[0])
    return "its chunks do not end where the file ends" if ends[-1] != part["bytes"] else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _is_dict_of_dicts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())


def read_index(file: Path, part: dict[str, Any], task: str, classes: tuple[str, ...]) -> dict[str, Array]:
    """Read the targets, names and (of encoded files) ends of a split, and check them against the description."""
    try:
        index = read_npz(file, _MAX_INDEX)
        problem = _index_problem(index, part, task, len(classes))
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        raise VitrailError(f"{file} is corrupted: {problem}. Pack the dataset again.")
    return index


def _index_problem(index: dict[str, Array], part: dict[str, Any], task: str, outputs: int) -> str | None:
    count = part["count"]
    shapes = {"classify": (count,), "unlabelled": (count, 0)}
    expected = {
        "targets": (np.int64 if task == "classify" else np.float32, shapes.get(task, (count, outputs))),
        "name_ends": (np.int64, (count,)),
        **({"ends": (np.int64, (count,))} if part["shape"] is None else {}),
    }
    for name, (dtype, shape) in expected.items():
        if name not in index or index[name].dtype != dtype or index[name].shape != shape:
            found = f"{index[name].dtype} {index[name].shape}" if name in index else "missing"
            return f"{name} is {found}; expected {np.dtype(dtype)} {shape}"
    block = index.get("name_block")
    if block is None or block.dtype != np.uint8 or block.ndim != 1:
        return "its names are missing"
    for name, total in (("name_ends", len(block)), ("ends", part["bytes"])):
        ends = index.get(name) if name in expected else None
        if ends is not None and (np.any(np.diff(ends, prepend=0) < 0) or (int(ends[-1]) if count else 0) != total):
            return f"{name} does not ascend to {total:,}"
    targets = index["targets"]
    if task == "classify" and count and not 0 <= int(targets.min()) <= int(targets.max()) < outputs:
        return f"a target is outside the {counted(outputs, 'class', 'classes')}"
    return None if np.isfinite(targets).all() else "a target is not finite"


def checksum_errors(folder: Path, description: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for every chunk of a packed dataset whose checksum is wrong."""
    for part in description["splits"].values():
        index = folder / part["index"]
        if hashlib.sha256(read_bytes(index, _MAX_INDEX)).hexdigest() != part["index_sha256"]:
            yield f"{index} is corrupted: its checksum has changed."
        start = 0
        with open(open_regular(folder / part["images"]), "rb") as file:  # noqa: PTH123 - a descriptor
            for end, digest in part["chunks"]:
                if digest_of_next(file, end - start) != digest:
                    yield f"{folder / part['images']} is corrupted between bytes {start:,} and {end:,}."
                start = end


def digest_of_next(file: BinaryIO, size: int) -> str:
    """Return the SHA-256 of the next `size` bytes, in pieces: a chunk may be larger than the memory."""
    digest = hashlib.sha256()
    while size > 0 and (piece := file.read(min(size, 1 << 24))):
        digest.update(piece)
        size -= len(piece)
    return digest.hexdigest()
