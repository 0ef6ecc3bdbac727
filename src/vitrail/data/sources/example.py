"""`example:cat`, `example:coffee`: photos that are included in the package, so that a first try needs no file.

The cat is Chelsea, by Stéfan van der Walt, the coffee an espresso, by Rachel Michetti; both photos are in the public domain (CC0).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.types import Payload, Split
from vitrail.errors import VitrailError, did_you_mean

PHOTOS = ("cat", "coffee")
_FOLDER = Path(__file__).parent / "photos"


def open_example(request: Request) -> OpenResult:
    """Open one included photo, without a label."""
    request.allow_options()
    if request.location not in PHOTOS:
        hint = did_you_mean(request.location, PHOTOS)
        known = ", ".join(f"example:{name}" for name in PHOTOS)
        raise VitrailError(f"{request.reference}: there is no such example.{hint} Included are {known}.")
    return OpenResult(splits={"test": ExampleSplit(request.location)}, detail="an included photo")


class ExampleSplit(Split):
    """One included photo; its name is its reference, which can be given again, unlike a path inside the package."""

    def __init__(self, photo: str) -> None:
        self.name, self.task, self.classes, self.targets = "test", "unlabelled", (), np.empty((1, 0), np.float32)
        self._photo = photo

    def image_name(self, index: int) -> str:
        return f"example:{self._photo}"

    def payload(self, index: int) -> Payload:
        return (_FOLDER / f"{self._photo}.jpg").read_bytes()
