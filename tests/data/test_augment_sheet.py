from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.memory_splits import MemorySplit, photos, picture, stored
from vitrail.data.augment import Augment
from vitrail.data.augment_sheet import _CELL, _GAP, _HEADER, _MARGIN, _spread, augment_sheet
from vitrail.data.contact_sheet import shorten
from vitrail.data.preprocess import preset
from vitrail.data.types import Array, Split
from vitrail.errors import VitrailError


def cells(path: Path, rows: int, columns: int) -> Array:
    """Return the cells of a sheet: [rows, 1 + columns, height, width, 3]."""
    sheet = np.asarray(Image.open(path))
    lefts = [_MARGIN + k * (_CELL + _GAP) + (12 if k else 0) for k in range(1 + columns)]
    tops = [_HEADER + k * (_CELL + _GAP) for k in range(rows)]
    return np.stack([np.stack([sheet[top : top + _CELL, left : left + _CELL] for left in lefts]) for top in tops])


@pytest.mark.parametrize(
    ("split", "channels"), [(photos(12), 3), (stored(12), 3), (stored(12, channels=1), 1)], ids=["photos", "stored", "grey"]
)
def test_each_row_is_an_image_and_each_column_an_epoch(split: Split, channels: int, tmp_path: Path) -> None:
    preprocess = preset("deit", size=_CELL, channels=channels)
    augment = Augment(randaugment="timm", mixup=0.2, mix_until=0.1)
    augment_sheet(split, preprocess, augment, tmp_path / "sheet.png", rows=4, columns=3, seed=1)
    found = cells(tmp_path / "sheet.png", 4, 3)
    for row, index in enumerate(_spread(split, 4, 1)):
        expected = preprocess.pixels(split.payload(int(index)), name="")
        assert np.abs(found[row, 0].astype(int) - expected).max() <= 1
    flat = found.reshape(-1, _CELL * _CELL * 3)
    assert len(np.unique(flat, axis=0)) == len(flat)  # no two are the same


def test_as_many_classes_as_possible() -> None:
    targets = np.array([0] * 90 + [1] * 5 + [2] * 5)
    split = MemorySplit([picture(0, 8, 8)] * 100, classes=3, targets=targets)
    for seed in range(5):
        assert sorted(targets[_spread(split, 3, seed)]) == [0, 1, 2]
        assert np.bincount(targets[_spread(split, 6, seed)]).tolist() == [2, 2, 2]
    assert len(np.unique(_spread(split, 200, 0))) == 100


def test_without_rows_there_is_no_sheet(tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match="at least one row"):
        augment_sheet(stored(4), preset("imagenet", size=16), Augment(), tmp_path / "sheet.png", rows=0)


def test_bad_images_have_no_row_if_they_are_skipped(tmp_path: Path) -> None:
    images: list[bytes | Array] = [picture(k, 40, 40) for k in range(4)]
    images[1] = b"I am a text"
    split, preprocess = MemorySplit(images), preset("deit", size=_CELL)
    with pytest.raises(VitrailError, match="a text file"):
        augment_sheet(split, preprocess, Augment(), tmp_path / "sheet.png", rows=4, columns=2)
    augment_sheet(split, preprocess, Augment(), tmp_path / "sheet.png", rows=4, columns=2, bad_images="skip")
    assert Image.open(tmp_path / "sheet.png").size[1] == _HEADER + 3 * (_CELL + _GAP) + 8


def test_lines_break_between_words() -> None:
    assert shorten("crop none, erase 0.25, smoothing 0.1", 30, wrap=15) == "crop none,\nerase 0.25,…"
    assert shorten("n02102040-" * 5, 60, wrap=22).count("\n") == 2
    assert shorten("a long line", 6) == "a lon…"
