"""Data that comes with the package: handwritten digits and two photos. SOURCES.md says where they are from."""

from __future__ import annotations

import gzip
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.errors import VitrailError

PHOTOS = ("cat", "coffee")
PHOTO_CREDIT = "Example photos by Stéfan van der Walt and Rachel Michetti, CC0."


def digits() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return 1,797 images [n, 8, 8] with values from 0 to 16, and the digits they show; hatch_build.py writes the file."""
    file = files(__name__).joinpath("digits.gz")
    if not file.is_file():
        raise VitrailError(
            "The digits are missing: they are added when Vitrail is installed, and this is a bare copy of its source. Install it, "
            "such as with `uv sync`, or give other images with --data."
        )
    rows = np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8).reshape(-1, 65)
    return rows[:, :64].reshape(-1, 8, 8), rows[:, 64].astype(np.int64)


def photo(name: str) -> bytes:
    """Return the JPEG file of one of `PHOTOS`."""
    return files(__name__).joinpath(f"{name}.jpg").read_bytes()
