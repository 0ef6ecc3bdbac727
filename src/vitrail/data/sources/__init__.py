"""Data sources: one string says where images come from, whatever form they lie in."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path

from vitrail.data.classes import align
from vitrail.data.sources.reference import BadImages, Opened, Request, taken_apart
from vitrail.data.types import Source
from vitrail.errors import VitrailError, nearest

log = logging.getLogger("vitrail.data")

KINDS = {
    "digits": "vitrail.data.sources.digits:open_digits",
    "folder": "vitrail.data.sources.folder:open_folder",
    "csv": "vitrail.data.sources.csv:open_csv",
    "packed": "vitrail.data.sources.packed:open_packed",
    "torchvision": "vitrail.data.sources.torchvision:open_torchvision",
    "hf": "vitrail.data.sources.hub:open_hub",
    "wds": "vitrail.data.sources.tars:open_tars",
}


def open_source(
    reference: str,
    *,
    classes: tuple[str, ...] | None = None,
    seed: int = 0,
    ignore_unknown: bool = False,
    bad_images: BadImages = "error",
) -> Source:
    """Open `kind:location?option=value`, or a bare path, with the classes of all splits in one order.

    `classes` are those of a checkpoint; without them the training split gives the order. A class unknown to it is an
    error unless `ignore_unknown`; a missing one is a warning. `seed` decides what is held out where a source has no
    splits of its own. `bad_images="skip"` leaves out rows of a table whose file is missing.
    """
    kind, location, options = taken_apart(reference)
    if kind is None:
        kind = _recognised(location)
    elif kind not in KINDS:
        raise VitrailError(
            f"{reference!r}: there is no source kind {kind!r}.{nearest(kind, KINDS)} "
            f"Sources are digits, {', '.join(f'{name}:…' for name in KINDS if name != 'digits')} or a path."
        )
    module, function = KINDS[kind].split(":")
    reader: Callable[[Request], Opened] = getattr(importlib.import_module(module), function)
    opened = reader(Request(reference, kind, location, options, seed, bad_images))
    splits = align(opened.splits, classes, ignore_unknown=ignore_unknown)
    source = Source(reference=reference, kind=kind, splits=splits, detail=opened.detail, left_out=opened.left_out)
    log.info("%s", source.describe())
    return source


def _recognised(location: str) -> str:
    """The kind of a bare path, by what lies there."""
    path = Path(location).expanduser()
    if location == "digits":
        return "digits"
    if path.is_dir():
        return "packed" if (path / "packed.json").exists() else "folder"
    endings = {".csv": "csv", ".tsv": "csv", ".tar": "wds", ".parquet": "hf"}
    if path.suffix.lower() in endings:
        return endings[path.suffix.lower()]
    if path.exists():
        raise VitrailError(
            f"{location} is a file, but not a table (.csv), a tar (.tar) or a .parquet file. "
            "A data source is one of these, or a folder of images."
        )
    raise VitrailError(
        f"{location!r} is neither a path that exists nor a source.{nearest(location, KINDS)} "
        f"Sources are digits, {', '.join(f'{name}:…' for name in KINDS if name != 'digits')} or a path."
    )
