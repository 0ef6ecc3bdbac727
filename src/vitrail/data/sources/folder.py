"""`folder:DIR`: split folders of class folders, or class folders alone, or (labels=none) any images at all."""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import NoReturn

import numpy as np

from vitrail.data.classes import split_name
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.layout import ACCEPTED, images_in, images_under, subfolders, tree
from vitrail.data.sources.reference import Opened, Request
from vitrail.data.split import held_out
from vitrail.data.types import counted
from vitrail.errors import VitrailError

log = logging.getLogger("vitrail.data")


def open_folder(request: Request) -> Opened:
    request.allow("val", "labels")
    root = Path(request.location).expanduser()
    if not root.is_dir():
        found = "is a file" if root.exists() else "does not exist" if not root.is_symlink() else "is a broken link"
        raise VitrailError(f"{request.reference}: {root} {found}; a folder of images is expected. Check the path.")
    if request.options.get("labels", "folder") not in ("folder", "none"):
        raise VitrailError(f"labels={request.options['labels']} in {request.reference}: write labels=none or leave it out.")
    parts = _split_folders(root)
    if request.options.get("labels") == "none":
        return _unlabelled(root, parts)
    if parts:
        return _split_layout(root, parts, request)
    return _single_layout(root, request)


def _split_folders(root: Path) -> dict[str, str]:
    parts: dict[str, str] = {}
    for folder in subfolders(root):
        name = split_name(folder)
        if name in parts:
            raise VitrailError(f"{root} has both {parts[name]}/ and {folder}/, which both mean {name!r}. Rename one of them.")
        if name is not None:
            parts[name] = folder
    return {name: parts[name] for name in ("train", "val", "test") if name in parts}


def _unlabelled(root: Path, parts: dict[str, str]) -> Opened:
    folders = parts or {"train": ""}
    found = {name: [f"{folder}/{file}".lstrip("/") for file in images_under(root / folder)] for name, folder in folders.items()}
    splits = {
        name: FileSplit(name, "unlabelled", root, files, np.empty((len(files), 0), np.float32), ()) for name, files in found.items()
    }
    if not any(map(len, splits.values())):
        _mistake(root, "there is no image in it")
    return Opened(splits=dict(splits), detail="images without labels")


def _split_layout(root: Path, parts: dict[str, str], request: Request) -> Opened:
    others = [folder for folder in subfolders(root) if folder not in parts.values()]
    if others:
        log.warning("%s: beside %s, these folders are not used: %s.", root, ", ".join(parts.values()), ", ".join(others[:8]))
    splits = {name: _class_folders(root, folder, name) for name, folder in parts.items()}
    if request.fraction("val", 0) and list(splits) == ["train"]:
        return _with_held_out(splits["train"], root, request, "training folder")
    if request.fraction("val", 0):
        raise VitrailError(f"val={request.options['val']} in {request.reference}: it already has {', '.join(splits)}.")
    return Opened(splits=dict(splits), detail="split folders")


def _single_layout(root: Path, request: Request) -> Opened:
    inner = subfolders(root)
    if not inner:
        loose = images_in(root)
        if loose:
            _mistake(root, f"it holds {counted(len(loose), 'image')} but no folder for any class", labels=True)
        _mistake(root, "there is no image in it")
    _look_for_shifted_levels(root, inner)
    return _with_held_out(_class_folders(root, "", "train"), root, request, "one folder of classes")


def _look_for_shifted_levels(root: Path, inner: list[str]) -> None:
    below = {name: subfolders(root / name) for name in inner}
    turned = [name for name in inner if below[name] and all(split_name(folder) for folder in below[name])]
    if len(inner) > 1 and turned:
        _mistake(
            root, f"{turned[0]}/ holds {', '.join(below[turned[0]])}: splits inside a class, where classes inside a split are meant"
        )
    only = inner[0]
    if len(inner) == 1 and below[only] and not images_in(root / only):
        _mistake(root, f"its one folder {only}/ holds the folders; you may mean folder:{root / only}")


def _with_held_out(split: FileSplit, root: Path, request: Request, what: str) -> Opened:
    fraction = request.fraction("val", 0.1)
    record = root / f"vitrail-split-seed{request.seed}-val{fraction:g}.csv"
    splits = held_out(split, fraction, seed=request.seed, record=record)
    saved = f", {fraction:.0%} held out as in {record.name}" if fraction and record.exists() else ""
    return Opened(splits=splits, detail=what + saved)


def _class_folders(root: Path, folder: str, name: str) -> FileSplit:
    """The class is the first folder; how deep the images lie below it does not matter."""
    top = root / folder
    classes = tuple(subfolders(top))
    prefix = f"{folder}/" if folder else ""
    files = [[f"{prefix}{label}/{file}" for file in images_under(top / label)] for label in classes]
    loose = images_in(top)
    if not any(files):
        what = (
            f"{folder or root.name}/ holds {counted(len(loose), 'image')} but no folder for any class"
            if loose
            else f"there is no image in {folder or 'it'}"
        )
        _mistake(root, what, labels=bool(loose))
    if loose:
        beside = counted(len(loose), "image")
        log.warning("%s: %s beside the class folders left out, such as %s.", top, beside, min(loose))
    targets = np.repeat(np.arange(len(classes), dtype=np.int64), [len(group) for group in files])
    return FileSplit(name, "classify", root, chain.from_iterable(files), targets, classes)


def _mistake(root: Path, what: str, *, labels: bool = False) -> NoReturn:
    hint = f"\nImages without labels, for pre-training or prediction, are folder:{root}?labels=none" if labels else ""
    raise VitrailError(f"{root} is not laid out as a data set: {what}.\n\nFound:\n{tree(root)}\n\nAccepted:\n{ACCEPTED}{hint}")
