"""`torchvision:NAME`: the datasets of torchvision; downloaded only with `?download=1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.labels import drop_unused_classes
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.split import hold_out
from vitrail.data.types import Array, Split
from vitrail.errors import VitrailError, did_you_mean
from vitrail.files import cache_folder

_TRAIN_FLAG = {"train": {"train": True}, "test": {"train": False}}
_TWO = {"train": {"split": "train"}, "test": {"split": "test"}}
_THREE = {"train": {"split": "train"}, "val": {"split": "val"}, "test": {"split": "test"}}
_TRAIN_VAL = {"train": {"split": "train"}, "val": {"split": "val"}}
_NO_SPLITS: dict[str, dict[str, Any]] = {"train": {}}
DATASETS: dict[str, dict[str, dict[str, Any]]] = {
    "CIFAR10": _TRAIN_FLAG,
    "CIFAR100": _TRAIN_FLAG,
    "MNIST": _TRAIN_FLAG,
    "FashionMNIST": _TRAIN_FLAG,
    "KMNIST": _TRAIN_FLAG,
    "SVHN": _TWO,
    "STL10": _TWO,
    "Flowers102": _THREE,
    "OxfordIIITPet": {"train": {"split": "trainval"}, "test": {"split": "test"}},
    "DTD": _THREE,
    "Food101": _TWO,
    "StanfordCars": _TWO,
    "FGVCAircraft": _THREE,
    "GTSRB": _TWO,
    "Imagenette": _TRAIN_VAL,
    "ImageNet": _TRAIN_VAL,
    "Country211": {"train": {"split": "train"}, "val": {"split": "valid"}, "test": {"split": "test"}},
    "CLEVRClassification": _TRAIN_VAL,
    "EuroSAT": _NO_SPLITS,
    "SUN397": _NO_SPLITS,
}


def open_torchvision(request: Request) -> OpenResult:
    request.allow_options("root", "download", "val")
    by_name = {name.casefold(): name for name in DATASETS}
    name = by_name.get(request.location.casefold())
    if name is None:
        raise VitrailError(
            f"{request.reference}: Vitrail cannot read the torchvision dataset {request.location!r}."
            f"{did_you_mean(request.location, DATASETS)} Supported are {', '.join(DATASETS)}."
        )
    if DATASETS[name] is not _NO_SPLITS and request.fraction("val", 0):
        already = ", ".join(DATASETS[name])
        raise VitrailError(f"val={request.options['val']} in {request.reference}: it already has {already}. Remove the option.")
    root = Path(request.options["root"]).expanduser() if "root" in request.options else cache_folder() / "torchvision"
    splits: dict[str, Split] = {
        split: _split(split, _dataset(name, root, arguments, request), root) for split, arguments in DATASETS[name].items()
    }
    rule = None
    if DATASETS[name] is _NO_SPLITS:
        fraction = request.fraction("val", 0.1)
        splits, rule = hold_out(splits["train"], fraction, rule=request.rule), request.rule if fraction else None
    return OpenResult(splits=splits, detail=f"{name} in {root}", rule=rule)


def _dataset(name: str, root: Path, arguments: dict[str, Any], request: Request) -> Any:
    import torchvision.datasets

    kind = getattr(torchvision.datasets, name)
    download = {"download": True} if request.flag("download") and name != "ImageNet" else {}
    try:
        if download:
            root.mkdir(parents=True, exist_ok=True)
        return kind(root=str(root), **arguments, **download)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise VitrailError(f"{name} needs the package {package}: pip install {package}.") from error
    except (RuntimeError, OSError) as error:  # not found, corrupted, or no network
        first = str(error).partition("\n")[0]
        first = first.partition(" You can use download=True")[0]  # not how it is written here
        advice = (
            "Check the connection, or copy the files there yourself."
            if download
            else f"Download it with torchvision:{name}?download=1, or give its folder with ?root=DIR."
        )
        raise VitrailError(f"{name} cannot be opened in {root}: {first.rstrip('.')}. {advice}") from error


def _split(name: str, dataset: Any, root: Path) -> Split:
    files, labels = _files_and_labels(dataset)
    classes = _class_names(dataset, labels)
    if files is not None:
        relative = [str(Path(file).relative_to(root)) if Path(file).is_relative_to(root) else str(file) for file in files]
        split: Split = FileSplit(name, "classify", root, relative, labels, classes)
    else:
        split = ArraySplit(name, "classify", _images(dataset), labels, classes)
    if not hasattr(dataset, "classes") and not hasattr(dataset, "wnids"):
        drop_unused_classes(split)  # classes are named by their numbers, and unused numbers are not classes
    return split


def _files_and_labels(dataset: Any) -> tuple[list[Any] | None, Array]:
    """Return (files or None, labels). torchvision stores lists of files under various names, and arrays otherwise."""
    for attribute in ("_samples", "samples"):
        if hasattr(dataset, attribute):
            files, labels = zip(*((sample[0], sample[1]) for sample in getattr(dataset, attribute)), strict=True)
            return list(files), np.asarray(labels, np.int64)
    labels = next(getattr(dataset, key) for key in ("_labels", "targets", "labels") if hasattr(dataset, key))
    for attribute in ("_image_files", "_images"):
        if isinstance(getattr(dataset, attribute, None), list):
            return getattr(dataset, attribute), np.asarray(labels, np.int64)
    return None, np.asarray(labels, np.int64)


def _class_names(dataset: Any, labels: Array) -> tuple[str, ...]:
    # Two classes of ImageNet are called "crane", so its classes are named by their WordNet ids.
    names = getattr(dataset, "wnids", None) or getattr(dataset, "classes", None)
    if names is None:
        return tuple(map(str, range(int(labels.max()) + 1)))
    return tuple(str(name) for name in names)


def _images(dataset: Any) -> Array:
    images = np.asarray(dataset.data)
    if images.ndim == 3:
        return images[:, :, :, None]
    channels_first = images.shape[1] == 3 and images.shape[3] != 3
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1)) if channels_first else images
