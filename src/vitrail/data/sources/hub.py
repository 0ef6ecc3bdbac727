"""`hf:NAME`: a dataset from the Hugging Face Hub, or local parquet files, through the `datasets` package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.classes import split_name
from vitrail.data.sources.labels import drop_unused_classes, infer_task, parse_targets
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.split import hold_out
from vitrail.data.types import Array, BadImage, Payload, Split, Task
from vitrail.errors import VitrailError
from vitrail.regular_files import read_bytes

_LABELS = ("label", "labels", "fine_label", "class", "target", "category")


class HubSplit(Split):
    """A column of images in memory-mapped Arrow files."""

    def __init__(self, name: str, column: Any, key: str, task: Task, targets: Array, classes: tuple[str, ...]) -> None:
        self.name, self.task, self.targets, self.classes = name, task, targets, classes
        self._column, self._key = column, key

    def image_name(self, index: int) -> str:
        return f"{index:08d}"

    def payload(self, index: int) -> Payload:
        value = self._column[int(index)][self._key]
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None and isinstance(value, dict) and value.get("path"):
            try:
                return read_bytes(value["path"])
            except OSError as error:
                raise BadImage(value["path"], f"cannot be read ({error.strerror})") from error
        if not isinstance(content, bytes):
            raise BadImage(f"{self.name} {self.image_name(index)}", "no image in this row")
        return content


def open_hub(request: Request) -> OpenResult:
    request.allow_options("config", "revision", "image", "label", "task", "val", "cache")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise VitrailError(f"{request.reference} needs the `datasets` package: pip install 'vitrail[hub]'.") from error
    loaded = _load(datasets, request)
    first = next(iter(loaded.values()))
    image, label = _columns(datasets, first.features, request)
    splits: dict[str, Split] = {}
    for hub_name, table in loaded.items():
        name = split_name(hub_name) or hub_name
        splits[name] = _split(datasets, name, table, image, label, request)
    rule = None
    if request.fraction("val", 0):
        if list(splits) != ["train"]:
            already = ", ".join(splits)
            raise VitrailError(f"val={request.options['val']} in {request.reference}: it already has {already}. Remove the option.")
        splits, rule = hold_out(splits["train"], request.fraction("val", 0.1), rule=request.rule), request.rule
    return OpenResult(splits=splits, detail=f"{request.location}, columns {image} and {label or 'no label'}", rule=rule)


def _load(datasets: Any, request: Request) -> dict[str, Any]:
    path = Path(request.location).expanduser()
    cache = request.options.get("cache")
    try:
        if (path / "dataset_dict.json").exists():
            return dict(datasets.load_from_disk(str(path)))
        if (path / "state.json").exists():
            return {"train": datasets.load_from_disk(str(path))}
        if path.exists():
            return dict(datasets.load_dataset("parquet", data_files=_parquet_files(path), cache_dir=cache))
        return dict(
            datasets.load_dataset(
                request.location,
                request.options.get("config"),
                revision=request.options.get("revision"),
                cache_dir=cache,
            )
        )
    except VitrailError:
        raise
    except Exception as error:  # `datasets` raises its own, the hub's, Arrow's and Python's errors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        advice = (
            "Its files may be incomplete: copy or download them again."
            if path.exists()
            else "Check the name and the connection. A dataset with several configs needs ?config=NAME. "
            "For a folder of parquet files, give its path."
        )
        raise VitrailError(f"{request.reference} cannot be opened: {lines[0].rstrip('.')}. {advice}") from error


def _parquet_files(path: Path) -> dict[str, list[str]]:
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise VitrailError(f"There is no .parquet file in {path}. For a folder of images, use folder:{path}.")
    parts: dict[str, list[str]] = {}
    for file in files:
        words = re.split(r"[^a-zA-Z]+", str(file.relative_to(path)) if path.is_dir() else file.stem)
        name = next((name for name in map(split_name, words) if name), "train")
        parts.setdefault(name, []).append(str(file))
    return {name: parts[name] for name in ("train", "val", "test") if name in parts}


def _columns(datasets: Any, features: Any, request: Request) -> tuple[str, str | None]:
    for option in ("image", "label"):
        chosen = request.options.get(option)
        if chosen is not None and chosen not in features:
            raise VitrailError(f"{request.reference} has no column {chosen!r}; it has {', '.join(features)}.")
    image = request.options.get("image") or next(
        (name for name, feature in features.items() if isinstance(feature, datasets.Image)),
        next((name for name in ("image", "img", "jpg", "png") if name in features), None),
    )
    if image is None:
        raise VitrailError(f"{request.reference} has no image column; it has {', '.join(features)}. Name it with ?image=COLUMN.")
    if request.options.get("task") == "unlabelled":
        return image, None
    label = request.options.get("label") or next(
        (name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)),
        next((name for name in _LABELS if name in features), None),
    )
    if label is None:
        raise VitrailError(
            f"{request.reference} has no label column; it has {', '.join(features)}. "
            "Name it with ?label=COLUMN, or use the images alone with ?task=unlabelled."
        )
    return image, label


def _split(datasets: Any, name: str, table: Any, image: str, label: str | None, request: Request) -> Split:
    if isinstance(table.features[image], datasets.Image):
        table = table.cast_column(image, datasets.Image(decode=False))  # decoded later, only as far as needed
    images = table.select_columns([image])
    if label is None:
        return HubSplit(name, images, image, "unlabelled", np.empty((len(table), 0), np.float32), ())
    values = table.select_columns([label]).with_format("arrow")[:][label]
    feature = table.features[label]
    inner = getattr(feature, "feature", None)
    if isinstance(feature, datasets.ClassLabel):
        targets = values.to_numpy().astype(np.int64)
        if len(targets) and (targets < 0).all():  # the Hub's convention for a test set with hidden labels
            return HubSplit(name, images, image, "unlabelled", np.empty((len(table), 0), np.float32), ())
        return HubSplit(name, images, image, "classify", targets, tuple(feature.names))
    if inner is not None:
        names = inner.names if isinstance(inner, datasets.ClassLabel) else None
        texts = [["|".join(str(names[k]) if names else str(k) for k in row)] for row in values.to_pylist()]
        task: Task = "multilabel"
    else:
        texts = [["" if value is None else str(value)] for value in values.to_pylist()]
        task = infer_task(texts, request.options.get("task"))
    targets, classes = parse_targets(texts, task, (label,), lambda row: f"{request.reference}, {name} row {row}")
    return drop_unused_classes(HubSplit(name, images, image, task, targets, classes))
