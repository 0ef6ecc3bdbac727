"""ImageNet's validation images and the sets that test its models: V2, A, R, Sketch and C, in the layouts of their distributions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vitrail.data import imagenet
from vitrail.data.classes import split_name
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.layout import images_under, subfolders
from vitrail.errors import VitrailError, counted

_WORDNET = re.compile(r"n\d{8}")
SEVERITIES = (1, 2, 3, 4, 5)

# Error of AlexNet on each corruption, the mean over severities (Hendrycks & Dietterich 2019). mCE is relative to it.
ALEXNET_ERROR = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}


@dataclass(frozen=True)
class ImageNetSet:
    """One set of images. `subset`: only these 200 outputs compete, because the set has only their classes."""

    title: str
    images: int
    subset: Literal["a", "r"] | None = None
    numbered: bool = False  # class folders are the numbers of the outputs

    @property
    def outputs(self) -> tuple[int, ...] | None:
        return imagenet.subset(self.subset) if self.subset else None


SETS = {
    "imagenet": ImageNetSet("ImageNet", 50_000),
    "v2": ImageNetSet("ImageNet-V2", 10_000, numbered=True),
    "a": ImageNetSet("ImageNet-A", 7_500, "a"),
    "r": ImageNetSet("ImageNet-R", 30_000, "r"),
    "sketch": ImageNetSet("ImageNet-Sketch", 50_889),
}


def open_set(key: str, folder: str | Path) -> FileSplit:
    """Open a set; targets are the outputs of an ImageNet-1k model."""
    which = SETS[key]
    return _class_folders(_top(_checked(key, folder), which), which)


def corruption_folders(folder: str | Path) -> dict[str, Path]:
    """Return the folder of each corruption of ImageNet-C. They may be in a folder per group: noise/gaussian_noise."""
    root = _checked("c", folder)
    found = {path.name: path for path in (*_folders(root), *(one for group in _folders(root) for one in _folders(group)))}
    known = [name for name in ALEXNET_ERROR if name in found]
    if not known:
        raise VitrailError(
            f"{root} has no corruption of ImageNet-C, such as gaussian_noise/1/n01440764; it has {_some(subfolders(root))}."
        )
    return {name: found[name] for name in known}


def _checked(key: str, folder: str | Path) -> Path:
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise VitrailError(f"--{key}: {root} {'is a file' if root.exists() else 'does not exist'}; a folder is expected.")
    return root


def open_corruptions(folders: dict[str, Path]) -> Iterator[tuple[str, int, FileSplit]]:
    """Yield (corruption, severity, images) from CORRUPTION/SEVERITY/CLASS, one at a time: all are 3.75 million images."""
    for name, path in folders.items():
        for severity in SEVERITIES:
            if (path / str(severity)).is_dir():
                which = ImageNetSet(f"ImageNet-C {name} {severity}", 50_000)
                yield name, severity, _class_folders(path / str(severity), which)


def _top(root: Path, which: ImageNetSet) -> Path:
    """Return the folder of the class folders: itself, its validation folder, or its only folder; never training images."""
    every = subfolders(root)
    validation = [name for name in every if split_name(name) == "val"]
    inner = [name for name in every if split_name(name) != "train"]
    if not validation and (_is_train(root) or (every and not inner)):
        raise VitrailError(
            f"{root} has training images; {which.title} is evaluated on {which.images:,} others, which the model was not trained "
            "on. Give their folder (if these are they, rename it: it must not be called train)."
        )
    if any(_output(name, which) is not None for name in inner):
        return root
    if len(validation) == 1:
        return root / validation[0]
    return _top(root / inner[0], which) if len(inner) == 1 else root


def _is_train(folder: Path) -> bool:
    return "train" in (split_name(folder.name), split_name(folder.resolve().name))


def _class_folders(top: Path, which: ImageNetSet) -> FileSplit:
    names = subfolders(top)
    outputs = {name: _output(name, which) for name in names}
    unknown = [name for name, output in outputs.items() if output is None]
    if unknown or not names:
        expected = "the numbers 0 to 999" if which.numbered else "WordNet IDs such as n01440764"
        found = f"it has {_some(unknown)}" if unknown else "it has no folders"
        raise VitrailError(f"{top} is not {which.title} in its usual layout: class folders are {expected}, {found}.")
    allowed = which.outputs
    if allowed is not None and (extra := [name for name in names if outputs[name] not in allowed]):
        raise VitrailError(
            f"{top} has {counted(len(extra), 'class', 'classes')} that {which.title} does not have ({_some(extra)}). "
            f"Give the folder of {which.title}."
        )
    files = {name: list(images_under(top / name)) for name in names}
    targets = np.repeat([outputs[name] for name in names], [len(files[name]) for name in names]).astype(np.int64)
    if not len(targets):
        raise VitrailError(f"{top} has class folders, but no images in them. Copy or unpack the images.")
    if len(targets) > which.images:
        raise VitrailError(
            f"{top} has {len(targets):,} images, but {which.title} has {which.images:,}. Does it have training images or copies?"
        )
    paths = (f"{name}/{file}" for name in names for file in files[name])
    return FileSplit("val", "classify", top, paths, targets, imagenet.labels("1k"))


def _output(name: str, which: ImageNetSet) -> int | None:
    """Return the output of a class folder. Numbers are outputs themselves: sorted as text, 10 would come before 2."""
    if _WORDNET.fullmatch(name):
        return _INDEX.get(name)
    return int(name) if which.numbered and name.isdecimal() and int(name) < 1000 else None


_INDEX = {wordnet_id: k for k, wordnet_id in enumerate(imagenet.wordnet_ids("1k"))}


def _folders(folder: Path) -> list[Path]:
    return [folder / name for name in subfolders(folder)]


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else "nothing"
