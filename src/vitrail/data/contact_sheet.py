"""One picture of a data set: a row a class, a few images of every split beside one another."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.data.decode import decode, unwrapped
from vitrail.data.types import Array, BadImage, Source, Split
from vitrail.files import atomic_file

_CELL, _GAP, _MARGIN, _HEAD = 96, 4, 190, 64
_PAPER, _INK, _FAINT, _FAULT = (250, 250, 247), (30, 30, 34), (120, 120, 126), (190, 40, 40)


def contact_sheet(source: Source, path: Path, *, rows: int = 14, seed: int = 0) -> None:
    """Write a PNG that shows at a glance whether the images belong to their labels."""
    columns = {name: 6 if place == 0 else 3 for place, name in enumerate(source.splits)}
    labels = _rows(source, rows)
    width = _MARGIN + sum(columns.values()) * (_CELL + _GAP) + 16 * len(columns)
    sheet = Image.new("RGB", (max(width, 640), _HEAD + len(labels) * (_CELL + _GAP) + 12), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((12, 10), _shortened(source.describe(), 110), _INK, _font(16))
    left = _MARGIN
    for name, count in columns.items():
        draw.text((left, 38), name, _FAINT, _font(14))
        for row, (text, label) in enumerate(labels):
            top = _HEAD + row * (_CELL + _GAP)
            if left == _MARGIN:
                draw.multiline_text((12, top + 8), _shortened(text, 60, wrap=22), _INK, _font(14))
            chosen = _members(source.splits[name], label, count, seed + row)
            for column, index in enumerate(chosen):
                _place(sheet, source.splits[name], int(index), (left + column * (_CELL + _GAP), top))
        left += count * (_CELL + _GAP) + 16
    with atomic_file(path) as temporary:
        sheet.save(temporary, "PNG")


def _rows(source: Source, most: int) -> list[tuple[str, int | None]]:
    if source.task not in ("classify", "multilabel"):
        return [("", None)] * min(most, 6)
    count = len(source.classes)
    chosen = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))
    return [(source.classes[k], int(k)) for k in chosen]


def _members(split: Split, label: int | None, count: int, seed: int) -> Array:
    if label is None:
        members = np.arange(len(split))
    elif split.task == "classify":
        members = np.flatnonzero(split.targets == label)
    else:
        members = np.flatnonzero(split.targets[:, label])
    return np.sort(np.random.default_rng(seed).permutation(members)[:count])


def _place(sheet: Image.Image, split: Split, index: int, corner: tuple[int, int]) -> None:
    draw = ImageDraw.Draw(sheet)
    try:
        payload = unwrapped(split.payload(index), name=split.image_name(index))
        channels = payload.shape[2] if isinstance(payload, np.ndarray) and payload.ndim == 3 else 3
        pixels = decode(payload, channels=channels, cover=(_CELL, _CELL), name=split.image_name(index))
    except BadImage:
        box = (*corner, corner[0] + _CELL - 1, corner[1] + _CELL - 1)
        draw.rectangle(box, outline=_FAULT, width=2)
        draw.text((corner[0] + 10, corner[1] + 38), "unreadable", _FAULT, _font(13))
        return
    image = Image.fromarray(pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, 0]).convert("RGB")
    scale = _CELL / max(image.size)
    small = image.size[0] * 3 < _CELL  # pixels of tiny images are shown as they are
    size = (max(1, round(image.size[0] * scale)), max(1, round(image.size[1] * scale)))
    image = image.resize(size, Image.Resampling.NEAREST if small else Image.Resampling.BICUBIC)
    sheet.paste(image, (corner[0] + (_CELL - size[0]) // 2, corner[1] + (_CELL - size[1]) // 2))


def _shortened(text: str, most: int, wrap: int | None = None) -> str:
    text = text.encode("utf-8", "replace").decode()  # a folder's name need not be text
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "\n".join(text[k : k + wrap] for k in range(0, len(text), wrap)) if wrap else text


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """DejaVu, which comes with matplotlib and knows most alphabets; Pillow's own font has little beyond ASCII."""
    home = find_spec("matplotlib")
    for folder in (home.submodule_search_locations or []) if home is not None else []:
        file = Path(folder, "mpl-data", "fonts", "ttf", "DejaVuSans.ttf")
        if file.exists():
            return ImageFont.truetype(str(file), size - 1)
    return ImageFont.load_default(size)
