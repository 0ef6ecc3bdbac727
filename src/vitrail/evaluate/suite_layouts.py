"""Read the structured tasks from their original distributions. Labels are derived from annotations as VTAB does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.files import FileSplit
from vitrail.data.types import Split
from vitrail.errors import VitrailError, reason_of
from vitrail.evaluate.suites import SuiteTask
from vitrail.regular_files import parse_json, read_bytes

Array = npt.NDArray[Any]
CLEVR_BINS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_BINS = (-100.0, 8.0, 20.0, 999.0)
_VEHICLES = ("Car", "Van", "Truck")


class MissingData(VitrailError):
    """The images of a task, or what is needed to split them, were not found."""


def open_layout(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    """Open a dataset in its original layout. Returns None if the folder has another layout."""
    readers: dict[str, Callable[[SuiteTask, Path], dict[str, Split] | None]] = {
        "clevr": _clevr,
        "kitti": _kitti,
        "dsprites": _dsprites,
        "smallnorb": _smallnorb,
    }
    if task.layout is None:
        return None
    try:
        return readers[task.layout](task, folder)
    except VitrailError:
        raise
    except (OSError, ValueError, LookupError, TypeError, BadZipFile) as error:
        raise VitrailError(
            f"{folder} is not {task.title} as it is distributed ({type(error).__name__}: {error}). Download the dataset again."
        ) from error


def bin_of(value: float, lower_bounds: tuple[float, ...]) -> int:
    """Return the index of the last lower bound below the value."""
    return int(np.flatnonzero(np.array(lower_bounds) < value).max(initial=0))


def _clevr(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    root = folder / "CLEVR_v1.0" if (folder / "CLEVR_v1.0").is_dir() else folder
    if not (root / "scenes").is_dir():
        return None
    splits: dict[str, Split] = {}
    for name in ("train", "val"):
        scenes = _json(root / "scenes" / f"CLEVR_{name}_scenes.json")["scenes"]
        files = [f"images/{name}/{scene['image_filename']}" for scene in scenes]
        if task.attribute == "count":
            labels = [len(scene["objects"]) - 3 for scene in scenes]
        else:
            labels = [bin_of(min(item["pixel_coords"][2] for item in scene["objects"]), CLEVR_BINS) for scene in scenes]
        splits[name] = _files(task, name, root, files, labels)
    return splits


def _kitti(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    root = folder / "training" if (folder / "training").is_dir() else folder
    if not (root / "label_2").is_dir():
        return None
    annotations = sorted((root / "label_2").glob("*.txt"))
    labels = [bin_of(_nearest_vehicle(file), KITTI_BINS) for file in annotations]
    part_of = _parts_of_drives(drives := _kitti_drives(folder, root, annotations))
    splits: dict[str, Split] = {}
    for name in ("train", "val", "test"):
        rows = [k for k, drive in enumerate(drives) if part_of[drive] == name]
        splits[name] = _files(task, name, root, [f"image_2/{annotations[k].stem}.png" for k in rows], [labels[k] for k in rows])
    return splits


def _kitti_drives(folder: Path, root: Path, annotations: list[Path]) -> list[str]:
    """Return the drive (video) of every image, from the mapping of KITTI's object development kit.

    Number i of train_rand.txt's permutation, from 0, is the line of train_mapping.txt, from 1, for the image that is named i.
    """
    places = [place / kit / "mapping" for place in (folder, root) for kit in ("", "devkit", "devkit_object")]
    mapping = next((place for place in places if (place / "train_mapping.txt").is_file()), None)
    if mapping is None:
        raise MissingData(
            f"KITTI in {folder} is split by video, because neighbouring frames are nearly equal. Unpack its object development kit "
            "(devkit_object.zip) there: mapping/train_mapping.txt and mapping/train_rand.txt are missing."
        )
    try:
        lines = (mapping / "train_mapping.txt").read_text(encoding="utf-8").split("\n")
        numbers = [int(word) for word in (mapping / "train_rand.txt").read_text(encoding="utf-8").replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise VitrailError(
            f"{mapping} is not the mapping of KITTI's object development kit ({error}). Unpack devkit_object.zip again."
        ) from error
    drives = []
    for file in annotations:
        image = int(file.stem) if file.stem.isdecimal() else len(numbers)
        line = numbers[image] if image < len(numbers) else 0
        drives.append(" ".join(lines[line - 1].split()[:2]) if 1 <= line <= len(lines) else "")
        if not drives[-1]:
            raise VitrailError(f"{mapping} does not name the drive of {file.name}. Unpack devkit_object.zip again.")
    return drives


def _parts_of_drives(drives: list[str]) -> dict[str, str]:
    """Assign whole drives to the test (a tenth), to validation (a tenth) and to training, by a hash of their names."""
    order = sorted(set(drives), key=lambda drive: hashlib.blake2b(drive.encode(), digest_size=8).digest())
    tenth = max(1, len(order) // 10)
    return {drive: "test" if k < tenth else "val" if k < 2 * tenth else "train" for k, drive in enumerate(order)}


def _nearest_vehicle(file: Path) -> float:
    """Return the depth of the nearest vehicle in metres, or 1000 if there is none. Columns 11 to 13 are x, y and z."""
    rows = [line.split() for line in file.read_text().splitlines() if line.strip()]
    return min([float(row[13]) for row in rows if row[0] in _VEHICLES], default=1000.0)


def _dsprites(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    files = sorted(folder.glob("dsprites*.npz"))
    if not files:
        return None
    with np.load(files[0], allow_pickle=False) as content:  # its `metadata` is a pickle and is not read
        images, latents = content["imgs"], content["latents_classes"]
    # The columns are colour, shape, scale, orientation, x and y.
    column, values = {"orientation": (3, 40), "x": (4, 32)}[task.attribute]
    labels = np.floor_divide(latents[:, column].astype(np.float32), values / task.classes).astype(np.int64)
    return {"train": ArraySplit("train", "classify", (images * 255).astype(np.uint8)[..., None], labels, _class_names(task))}


def _smallnorb(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    splits: dict[str, Split] = {}
    for name, word in (("train", "training"), ("test", "testing")):
        image_files, info_files = (sorted(folder.glob(f"smallnorb*-{word}-{kind}.mat")) for kind in ("dat", "info"))
        if not image_files or not info_files:
            return None
        info = _read_matrix(info_files[0])  # instance, elevation, azimuth, lighting
        labels = info[:, 1] if task.attribute == "elevation" else info[:, 2] // 2
        images = _read_matrix(image_files[0])[:, 0, :, :, None]  # the left one of the two cameras
        splits[name] = ArraySplit(name, "classify", images, labels.astype(np.int64), _class_names(task))
    return splits


_TYPES = {0x1E3D4C55: np.uint8, 0x1E3D4C54: np.int32, 0x1E3D4C51: np.float32}


def _read_matrix(file: Path) -> Array:
    """Read smallNORB's binary format: dtype, number of dimensions, sizes (at least three), values."""
    content = file.read_bytes()
    magic, dimensions = np.frombuffer(content.ljust(8, b"\0"), "<i4", 2)
    if int(magic) not in _TYPES or not 1 <= dimensions <= 4:
        raise VitrailError(f"{file} is not a smallNORB matrix. Unpack the downloaded .gz files first.")
    stored = max(int(dimensions), 3)
    shape = tuple(np.frombuffer(content, "<i4", stored, 8)[: int(dimensions)].tolist())
    return np.frombuffer(content, _TYPES[int(magic)], int(np.prod(shape)), 8 + 4 * stored).reshape(shape)


def _files(task: SuiteTask, name: str, root: Path, files: list[str], labels: list[int]) -> FileSplit:
    return FileSplit(name, "classify", root, files, np.array(labels, np.int64), _class_names(task))


def _class_names(task: SuiteTask) -> tuple[str, ...]:
    first = 3 if task.attribute == "count" else 0
    return tuple(str(first + k) for k in range(task.classes))


def _json(file: Path) -> Any:
    try:
        return parse_json(read_bytes(file))
    except (OSError, ValueError) as error:
        raise VitrailError(f"Cannot read the annotations {file} ({reason_of(error)}). Download the dataset again.") from error
