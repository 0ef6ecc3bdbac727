"""`folder:DIR`: split folders of class folders, class folders alone, or (labels=none) any images."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NoReturn

import numpy as np

from vitrail.data.classes import split_name
from vitrail.data.settings import rule_words
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.layout import ACCEPTED, images_in, images_under, subfolders, tree, warn_of_skipped
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.split import hold_out, older_name
from vitrail.data.types import BadImage
from vitrail.errors import VitrailError, counted

log = logging.getLogger("vitrail.data")


def open_folder(request: Request) -> OpenResult:
    request.allow_options("val", "labels")
    root = Path(request.location).expanduser()
    if not root.is_dir():
        found = "is a file" if root.exists() else "does not exist" if not root.is_symlink() else "is a broken link"
        raise VitrailError(f"{request.reference}: {root} {found}; a folder of images is expected. Check the path.")
    if request.options.get("labels", "folder") not in ("folder", "none"):
        raise VitrailError(f"labels={request.options['labels']} in {request.reference}: write labels=none, or remove it.")
    parts = _split_folders(root)
    special: list[BadImage] = []
    if request.options.get("labels") == "none":
        opened = _unlabelled(root, parts, special)
    elif parts:
        opened = _split_layout(root, parts, request, special)
    else:
        opened = _single_layout(root, request, special)
    warn_of_skipped(root, special)
    return replace(opened, skipped=tuple(special))


def _split_folders(root: Path) -> dict[str, str]:
    parts: dict[str, str] = {}
    for folder in subfolders(root):
        name = split_name(folder)
        if name in parts:
            raise VitrailError(f"{root} has both {parts[name]}/ and {folder}/, which both mean {name!r}. Rename one of them.")
        if name is not None:
            parts[name] = folder
    return {name: parts[name] for name in ("train", "val", "test") if name in parts}


def _unlabelled(root: Path, parts: dict[str, str], special: list[BadImage]) -> OpenResult:
    folders = parts or {"train": ""}
    found = {
        name: [f"{folder}/{file}".lstrip("/") for file in images_under(root / folder, special=special)]
        for name, folder in folders.items()
    }
    splits = {
        name: FileSplit(name, "unlabelled", root, files, np.empty((len(files), 0), np.float32), ()) for name, files in found.items()
    }
    if not any(map(len, splits.values())):
        _layout_error(root, "it contains no images")
    return OpenResult(splits=dict(splits), detail="images without labels")


def _split_layout(root: Path, parts: dict[str, str], request: Request, special: list[BadImage]) -> OpenResult:
    others = [folder for folder in subfolders(root) if folder not in parts.values()]
    if others:
        log.warning("%s: using only %s; ignored folders: %s.", root, ", ".join(parts.values()), ", ".join(others[:8]))
    splits = {name: _class_folders(root, folder, name, special) for name, folder in parts.items()}
    if request.fraction("val", 0) and list(splits) == ["train"]:
        return _with_hold_out(splits["train"], root, request, "training folder")
    if request.fraction("val", 0):
        already = ", ".join(splits)
        raise VitrailError(f"val={request.options['val']} in {request.reference}: it already has {already}. Remove the option.")
    return OpenResult(splits=dict(splits), detail="split folders")


def _single_layout(root: Path, request: Request, special: list[BadImage]) -> OpenResult:
    inner = subfolders(root)
    if not inner:
        loose = images_in(root)
        if loose:
            _layout_error(root, f"it contains {counted(len(loose), 'image')} but no class folders", labels=True)
        _layout_error(root, "it contains no images")
    _check_nesting(root, inner)
    return _with_hold_out(_class_folders(root, "", "train", special), root, request, "one folder of classes")


def _check_nesting(root: Path, inner: list[str]) -> None:
    below = {name: subfolders(root / name) for name in inner}
    swapped = [name for name in inner if below[name] and all(split_name(folder) for folder in below[name])]
    if len(inner) > 1 and swapped:
        _layout_error(
            root,
            f"{swapped[0]}/ contains {', '.join(below[swapped[0]])}: splits inside a class, but classes inside splits are expected",
        )
    only = inner[0]
    if len(inner) == 1 and below[only] and not images_in(root / only):
        _layout_error(root, f"its only folder {only}/ contains the folders. Did you mean folder:{root / only}?")


def _with_hold_out(split: FileSplit, root: Path, request: Request, what: str) -> OpenResult:
    fraction = request.fraction("val", 0.1)
    splits = hold_out(split, fraction, rule=request.rule, older_file=root / older_name(request.rule, fraction))
    detail = f"{what}, {fraction:.0%} held out {rule_words(request.rule)}" if fraction else what
    return OpenResult(splits=splits, detail=detail, rule=request.rule if fraction else None)


def _class_folders(root: Path, folder: str, name: str, special: list[BadImage]) -> FileSplit:
    """Read class folders. Images may be at any depth below them."""
    top = root / folder
    classes = tuple(subfolders(top))
    prefix = f"{folder}/" if folder else ""
    files = [[f"{prefix}{label}/{file}" for file in images_under(top / label, special=special)] for label in classes]
    loose = images_in(top)
    if not any(files):
        what = (
            f"{folder or root.name}/ contains {counted(len(loose), 'image')} but no class folders"
            if loose
            else f"{folder or 'it'} contains no images"
        )
        _layout_error(root, what, labels=bool(loose))
    if loose:
        skipped = counted(len(loose), "image")
        log.warning("%s: skipped %s outside the class folders, for example %s.", top, skipped, min(loose))
    targets = np.repeat(np.arange(len(classes), dtype=np.int64), [len(group) for group in files])
    return FileSplit(name, "classify", root, chain.from_iterable(files), targets, classes)


def _layout_error(root: Path, what: str, *, labels: bool = False) -> NoReturn:
    unread: list[BadImage] = []
    if next(images_under(root, special=unread), None) is None and unread:
        what += f", only files such as {unread[0].name} ({unread[0].reason})"
    hint = f"\nFor images without labels (pre-training or prediction) use folder:{root}?labels=none" if labels else ""
    raise VitrailError(
        f"{root} does not have the layout of a dataset: {what}.\n\nFound:\n{tree(root)}\n\nAccepted:\n{ACCEPTED}{hint}"
    )
