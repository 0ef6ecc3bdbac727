"""What an exported file says about itself: written from the checkpoint, checked when opened, compared with the checkpoint again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, get_args

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError, counted
from vitrail.export.settings import PRECISIONS, ExportSettings, Format, Input
from vitrail.text import printable, to_json
from vitrail.version import __version__

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle

LAYOUTS: dict[Input, str] = {
    "normalised": "batch, channel, height, width",
    "pixels": "batch, height, width, channel",
    "images": "batch, height, width, channel",
}
NEEDED = (
    "model",
    "config",
    "classes",
    "task",
    "activation",
    "thresholds",
    "preprocess",
    "input",
    "input_type",
    "layout",
    "precision",
)
Shape = tuple[int | None, ...]
"""None: any length."""


def metadata_of(bundle: Bundle, settings: ExportSettings, input_type: str) -> dict[str, Any]:
    """Return what is stored with the exported model."""
    return {
        **_for_clients(bundle),
        "input": settings.input,
        "input_type": input_type,
        "layout": LAYOUTS[settings.input],
        "format": settings.format,
        "precision": settings.precision,
        "opset": settings.opset if settings.format == "onnx" else None,
        "source": bundle.report.source,
        "assumptions": bundle.report.assumptions,
        "versions": {"vitrail": __version__, "torch": version("torch")},
    }


def _for_clients(bundle: Bundle) -> dict[str, Any]:
    """Return what turns an image into the model's input, and the logits into an answer."""
    return {
        "model": bundle.model.config.name,
        "config": bundle.model.config.to_dict(),
        "classes": list(bundle.classes) if bundle.classes else [],
        "task": bundle.task,
        "activation": "sigmoid" if bundle.sigmoid else "none" if bundle.task == "regress" else "softmax",
        "thresholds": list(bundle.thresholds) if bundle.task == "multilabel" else [],
        "preprocess": bundle.stored_preprocess().to_dict(),
    }


def differences(metadata: Mapping[str, Any], bundle: Bundle) -> list[str]:
    """Say in what the metadata differ from the checkpoint, wherever a client that reads them would answer differently."""
    found: list[str] = []
    for key, value in json.loads(to_json(_for_clients(bundle))).items():
        if metadata.get(key) is not None:  # of a file that was opened, it is there
            expected = printable(value) if isinstance(value, str) else value  # as it is written
            found += _differences(f"vitrail.{key}", metadata[key], expected)
    return found


_NOT_READ = "vitrail.preprocess.name"  # of the preset that the fields came from; they are what is compared


def _differences(name: str, found: Any, expected: Any) -> Iterator[str]:
    if found == expected or name == _NOT_READ:
        return
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in dict.fromkeys([*expected, *found]):
            yield from _differences(f"{name}.{key}", found.get(key), expected.get(key))
        return
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        places = [place for place, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        others = f" ({len(places)} of {len(found)} differ)" if len(places) > 1 else ""
        yield f"{name}[{places[0]}] is {_shown(found[places[0]])}, expected {_shown(expected[places[0]])}{others}"
        return
    yield f"{name} is {_shown(found)}, expected {_shown(expected)}"


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return counted(len(value), "value")
    text = printable(to_json(value), one_line=True)
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_metadata(metadata: Any, format: Format, type: str, shape: Sequence[int | None]) -> str | None:
    """Return what is wrong with the metadata of a file whose input has this type and shape, or None.

    Later readers then find what they expect, and the graph gets an input that it can run.
    """
    entries: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
    missing = [key for key in NEEDED if key not in entries]
    if missing:
        return f"its metadata has no {', '.join(missing)}"
    choices: dict[str, tuple[Any, ...]] = {
        "precision": PRECISIONS[format],
        "input": get_args(Input),
        "task": ("classify", "multilabel", "regress"),
        "activation": ("softmax", "sigmoid", "none"),
    }
    for key, allowed in choices.items():
        if entries[key] not in allowed:
            return f"vitrail.{key} is {_shown(entries[key])}, expected {' or '.join(allowed)}"
    for key, kind in (("classes", str), ("thresholds", (int, float))):
        if not isinstance(entries[key], list) or not all(isinstance(value, kind) for value in entries[key]):
            return f"vitrail.{key} is {_shown(entries[key])}, expected a list of {'names' if kind is str else 'numbers'}"
    for key in ("config", "preprocess"):
        if not isinstance(entries[key], dict):
            return f"vitrail.{key} cannot be read: it is {_shown(entries[key])}, expected fields with their values"
    try:
        preprocess = Preprocess.from_dict(entries["preprocess"])
    except (VitrailError, TypeError, ValueError) as error:
        return f"vitrail.preprocess cannot be read ({error})"
    input: Input = entries["input"]
    size: Shape = (None, None) if input == "images" else preprocess.size
    expected: Shape = (None, preprocess.channels, *size) if input == "normalised" else (None, *size, preprocess.channels)
    stated = (_shape(expected), entries["input_type"], entries["layout"])
    if stated != (_shape(shape), type, LAYOUTS[input]):
        return (
            f"vitrail.preprocess, input, input_type and layout describe {_shape(expected)} of type {_shown(stated[1])} "
            f"({_shown(stated[2])}), but the model takes {_shape(shape)} of type {type} ({LAYOUTS[input]})"
        )
    return None


def _shape(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if side is None else str(side) for side in shape) + "]"
