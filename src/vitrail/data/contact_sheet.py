"""Contact sheet of a dataset: one row per class, with a few images of every split."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.data.thumbnails import split_thumbnail
from vitrail.data.types import Array, Source, Split
from vitrail.files import atomic_file
from vitrail.text import printable

log = logging.getLogger("vitrail.data")
_UNASSIGNED = "\U0010fffd"  # drawn as the box for what a font lacks
_CELL, _GAP, _MARGIN, _HEADER = 96, 4, 190, 64
BACKGROUND, TEXT, MUTED, _ERROR = (250, 250, 247), (30, 30, 34), (120, 120, 126), (190, 40, 40)


def contact_sheet(source: Source, path: Path, *, rows: int = 14, seed: int = 0) -> None:
    """Write a PNG in which wrong labels can be seen at a glance."""
    columns = {name: 6 if k == 0 else 3 for k, name in enumerate(source.splits)}
    labels = _rows(source, rows)
    width = _MARGIN + sum(columns.values()) * (_CELL + _GAP) + 16 * len(columns)
    sheet = Image.new("RGB", (max(width, 640), _HEADER + len(labels) * (_CELL + _GAP) + 12), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.text((12, 10), shorten(source.describe(), 110), TEXT, font(16))
    left = _MARGIN
    for name, count in columns.items():
        draw.text((left, 38), name, MUTED, font(14))
        for row, (text, label) in enumerate(labels):
            top = _HEADER + row * (_CELL + _GAP)
            if left == _MARGIN:
                draw.multiline_text((12, top + 8), shorten(text, 60, wrap=22), TEXT, font(14))
            chosen = _members(source.splits[name], label, count, seed + row)
            for column, index in enumerate(chosen):
                _paste(sheet, source.splits[name], int(index), (left + column * (_CELL + _GAP), top))
        left += count * (_CELL + _GAP) + 16
    mention_missing([source.describe(), *(text for text, _ in labels)])
    with atomic_file(path) as temporary:
        sheet.save(temporary, "PNG")


def _rows(source: Source, limit: int) -> list[tuple[str, int | None]]:
    if source.task not in ("classify", "multilabel"):
        return [("", None)] * min(limit, 6)
    count = len(source.classes)
    chosen = np.unique(np.linspace(0, count - 1, min(limit, count)).round().astype(int))
    return [(source.classes[k], int(k)) for k in chosen]


def _members(split: Split, label: int | None, count: int, seed: int) -> Array:
    if label is None:
        members = np.arange(len(split))
    elif split.task == "classify":
        members = np.flatnonzero(split.targets == label)
    else:
        members = np.flatnonzero(split.targets[:, label])
    return np.sort(np.random.default_rng(seed).permutation(members)[:count])


def _paste(sheet: Image.Image, split: Split, index: int, corner: tuple[int, int]) -> None:
    draw = ImageDraw.Draw(sheet)
    image = split_thumbnail(split, index, _CELL)
    if image is None:
        box = (*corner, corner[0] + _CELL - 1, corner[1] + _CELL - 1)
        draw.rectangle(box, outline=_ERROR, width=2)
        draw.text((corner[0] + 10, corner[1] + 38), "unreadable", _ERROR, font(13))
        return
    sheet.paste(image, (corner[0] + (_CELL - image.size[0]) // 2, corner[1] + (_CELL - image.size[1]) // 2))


def shorten(text: str, limit: int, wrap: int | None = None) -> str:
    text = printable(text, one_line=True)
    if wrap:
        return textwrap.fill(text, wrap, max_lines=-(-limit // wrap), placeholder="…")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def mention_missing(texts: Iterable[str]) -> None:
    """Log one sentence about the characters that the font of a sheet does not have."""
    face = font(14)
    box = bytes(face.getmask(_UNASSIGNED))
    found = dict.fromkeys(one for text in texts for one in printable(text) if ord(one) > 127)
    missing = [one for one in found if bytes(face.getmask(one)) == box]
    if missing:
        shown = " ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        log.warning("The font of the sheet, DejaVu Sans, does not have %s: they are drawn as boxes.", shown)


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Load DejaVu, which is installed with matplotlib and has most alphabets; Pillow's font has little beyond ASCII."""
    spec = find_spec("matplotlib")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder, "mpl-data", "fonts", "ttf", "DejaVuSans.ttf")
        if file.exists():
            return ImageFont.truetype(str(file), size - 1)
    return ImageFont.load_default(size)
