"""The structured tasks in the form their makers distribute them: labels are made from annotations as VTAB makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.files import FileSplit
from vitrail.data.types import Split
from vitrail.errors import VitrailError
from vitrail.evaluate.suites import SuiteTask

Array = npt.NDArray[Any]
CLEVR_CUTS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_CUTS = (-100.0, 8.0, 20.0, 999.0)
_VEHICLES = ("Car", "Van", "Truck")


def open_layout(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    """The splits of a set that lies in its makers' form, or None where it does not."""
    readers: dict[str, Callable[[SuiteTask, Path], dict[str, Split] | None]] = {
        "clevr": _clevr,
        "kitti": _kitti,
        "dsprites": _dsprites,
        "smallnorb": _smallnorb,
    }
    return readers[task.layout](task, folder) if task.layout else None


def bin_of(value: float, cuts: tuple[float, ...]) -> int:
    """The last cut that lies below the value."""
    return int(np.flatnonzero(np.array(cuts) < value).max(initial=0))


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
            labels = [bin_of(min(thing["pixel_coords"][2] for thing in scene["objects"]), CLEVR_CUTS) for scene in scenes]
        splits[name] = _files(task, name, root, files, labels)
    return splits


def _kitti(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    root = folder / "training" if (folder / "training").is_dir() else folder
    if not (root / "label_2").is_dir():
        return None
    annotations = sorted((root / "label_2").glob("*.txt"))
    labels = [bin_of(_nearest_vehicle(file), KITTI_CUTS) for file in annotations]
    files = [f"image_2/{file.stem}.png" for file in annotations]
    return {"train": _files(task, "train", root, files, labels)}


def _nearest_vehicle(file: Path) -> float:
    """Depth in metres of the nearest vehicle; 1000 where there is none. Columns 11 to 13 are its place, x, y and z."""
    rows = [line.split() for line in file.read_text().splitlines() if line.strip()]
    return min([float(row[13]) for row in rows if row[0] in _VEHICLES], default=1000.0)


def _dsprites(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    found = sorted(folder.glob("dsprites*.npz"))
    if not found:
        return None
    with np.load(found[0], allow_pickle=False) as content:  # its `metadata` is a pickle, and is left alone
        images, latents = content["imgs"], content["latents_classes"]
    # The columns are colour, shape, scale, orientation, x and y.
    column, values = {"orientation": (3, 40), "x": (4, 32)}[task.attribute]
    labels = np.floor_divide(latents[:, column].astype(np.float32), values / task.classes).astype(np.int64)
    return {"train": ArraySplit("train", "classify", (images * 255).astype(np.uint8)[..., None], labels, _numbers(task))}


def _smallnorb(task: SuiteTask, folder: Path) -> dict[str, Split] | None:
    splits: dict[str, Split] = {}
    for name, word in (("train", "training"), ("test", "testing")):
        pictures, facts = (sorted(folder.glob(f"smallnorb*-{word}-{kind}.mat")) for kind in ("dat", "info"))
        if not pictures or not facts:
            return None
        info = _matrix(facts[0])  # instance, elevation, azimuth, lighting
        labels = info[:, 1] if task.attribute == "elevation" else info[:, 2] // 2
        images = _matrix(pictures[0])[:, 0, :, :, None]  # of the two cameras, the left one
        splits[name] = ArraySplit(name, "classify", images, labels.astype(np.int64), _numbers(task))
    return splits


_TYPES = {0x1E3D4C55: np.uint8, 0x1E3D4C54: np.int32, 0x1E3D4C51: np.float32}


def _matrix(file: Path) -> Array:
    """The binary form of smallNORB: a type, the number of dimensions, their sizes (at least three), the values."""
    content = file.read_bytes()
    magic, dimensions = np.frombuffer(content, "<i4", 2)
    if int(magic) not in _TYPES or not 1 <= dimensions <= 4:
        raise VitrailError(f"{file} is not a matrix of smallNORB. Unpack the .gz files it comes in.")
    stored = max(int(dimensions), 3)
    shape = tuple(np.frombuffer(content, "<i4", stored, 8)[: int(dimensions)].tolist())
    return np.frombuffer(content, _TYPES[int(magic)], int(np.prod(shape)), 8 + 4 * stored).reshape(shape)


def _files(task: SuiteTask, name: str, root: Path, files: list[str], labels: list[int]) -> FileSplit:
    return FileSplit(name, "classify", root, files, np.array(labels, np.int64), _numbers(task))


def _numbers(task: SuiteTask) -> tuple[str, ...]:
    first = 3 if task.attribute == "count" else 0
    return tuple(str(first + k) for k in range(task.classes))


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VitrailError(f"Cannot read the annotations {file} ({error}). The set is incomplete: fetch it again.") from error
