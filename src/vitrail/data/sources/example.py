"""`example:cat`, `example:coffee`: photos that are included in the package, so that a first try needs no file.

The cat is Chelsea, by Stéfan van der Walt, the coffee an espresso, by Rachel Michetti; both photos are in the public domain (CC0).
"""

from __future__ import annotations

import numpy as np

from vitrail.data import embedded
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.types import Payload, Split
from vitrail.errors import VitrailError, did_you_mean


def open_example(request: Request) -> OpenResult:
    """Open one included photo, without a label."""
    request.allow_options()
    if request.location not in embedded.PHOTOS:
        hint = did_you_mean(request.location, embedded.PHOTOS)
        known = ", ".join(f"example:{name}" for name in embedded.PHOTOS)
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
        return embedded.photo(self._photo)
