"""Data sources: one string says where images come from, in any of several formats."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from vitrail.data.classes import align
from vitrail.data.settings import BY_NAME, BadImages, check_rule
from vitrail.data.sources.reference import OpenResult, Request, parse_reference
from vitrail.data.types import Source
from vitrail.errors import VitrailError, did_you_mean

log = logging.getLogger("vitrail.data")

KINDS = {
    "digits": "vitrail.data.sources.digits:open_digits",
    "example": "vitrail.data.sources.example:open_example",
    "folder": "vitrail.data.sources.folder:open_folder",
    "csv": "vitrail.data.sources.csv:open_csv",
    "packed": "vitrail.data.sources.packed:open_packed",
    "torchvision": "vitrail.data.sources.torchvision:open_torchvision",
    "hf": "vitrail.data.sources.hub:open_hub",
    "wds": "vitrail.data.sources.tars:open_tars",
}
_EXPECTED = f"A source is digits, {', '.join(f'{name}:…' for name in KINDS if name not in ('digits', 'example'))} or a path."


def open_source(
    reference: str,
    *,
    classes: tuple[str, ...] | None = None,
    rule: str = BY_NAME,
    ignore_unknown: bool = False,
    bad_images: BadImages = "error",
) -> Source:
    """Open `kind:location?option=value`, or a path, with the same class order in all splits.

    `classes` are those of a checkpoint; default: the classes of the training split. An unknown class is an error unless
    `ignore_unknown`; a missing one is a warning. `rule` selects the held-out images if the source has no splits.
    `bad_images="skip"` skips rows of a table whose file is missing.
    """
    kind, location, options = resolve(reference)
    check_rule(rule)
    module, function = KINDS[kind].split(":")
    reader: Callable[[Request], OpenResult] = getattr(importlib.import_module(module), function)
    opened = reader(Request(reference, kind, location, options, rule, bad_images))
    splits = align(opened.splits, classes, ignore_unknown=ignore_unknown)
    source = Source(
        reference=reference,
        kind=kind,
        splits=splits,
        detail=opened.detail,
        skipped=opened.skipped,
        rule=opened.rule,
        made_from=opened.made_from,
    )
    log.info("%s", source.describe())
    return source


def resolve(reference: str) -> tuple[str, str, dict[str, str]]:
    """Return (kind, location, options) of a reference; the kind of a path is inferred."""
    kind, location, options = parse_reference(reference)
    if not location and kind not in ("digits", "wds"):  # an unset variable of a script would mean the current folder
        raise VitrailError(f"The data source {reference!r} has no path or name. Write . for the current folder.")
    if kind is None:
        kind = _infer_kind(location)
    elif kind not in KINDS:
        raise VitrailError(f"{reference!r}: there is no source kind {kind!r}.{did_you_mean(kind, KINDS)} {_EXPECTED}")
    return kind, location, options


def _infer_kind(location: str) -> str:
    """Infer the kind of a path without a kind."""
    path = Path(location).expanduser()
    if location == "digits":
        return "digits"
    if os.path.isdir(path):  # noqa: PTH112 - False for a name that is too long, where Path raises
        return "packed" if (path / "packed.json").exists() else "folder"
    suffixes = {".csv": "csv", ".tsv": "csv", ".tar": "wds", ".parquet": "hf"}
    if path.suffix.lower() in suffixes:
        return suffixes[path.suffix.lower()]
    if os.path.exists(path):  # noqa: PTH110
        raise VitrailError(
            f"{location} is not a table (.csv), a tar (.tar) or a .parquet file. "
            "A data source is one of these, or a folder of images."
        )
    raise VitrailError(f"{location!r} is neither an existing path nor a source.{did_you_mean(location, KINDS)} {_EXPECTED}")
