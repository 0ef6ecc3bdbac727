"""Data that comes with the package: handwritten digits and two photos. SOURCES.md says where they are from."""

from __future__ import annotations

import gzip
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

PHOTOS = ("china.jpg", "flower.jpg")
"""640 × 427 pixels each."""
PHOTO_CREDIT = "Example photos by danielbuechele and vultilion, CC BY 2.0."


def digits() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return 1,797 images [n, 8, 8] with values from 0 to 16, and the digits they show."""
    content = gzip.decompress(files(__name__).joinpath("digits.gz").read_bytes())
    rows = np.frombuffer(content, np.uint8).reshape(-1, 65)
    return rows[:, :64].reshape(-1, 8, 8), rows[:, 64].astype(np.int64)


def photo(name: str) -> bytes:
    """Return the file of one of `PHOTOS`."""
    return files(__name__).joinpath(name).read_bytes()
