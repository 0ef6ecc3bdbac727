"""Several splits as one, and images that are known to be missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.data.types import Array, BadImage, PackedStrings, Payload, Split


class Chain(Split):
    """The images of several splits, one after another, without labels."""

    def __init__(self, parts: Sequence[Split]) -> None:
        self.name, self.task, self.classes = "images", "unlabelled", ()
        self._parts, self._ends = tuple(parts), np.cumsum([len(part) for part in parts])
        self.targets = np.empty((int(self._ends[-1]), 0), np.float32)

    def image_name(self, index: int) -> str:
        part, position = self._find(index)
        return part.image_name(position)

    def payload(self, index: int) -> Payload:
        part, position = self._find(index)
        return part.payload(position)

    def read_ahead(self, indices: Array) -> None:
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            part = self._parts[number]
            part.read_ahead(indices[numbers == number] - (int(self._ends[number]) - len(part)))

    def _find(self, index: int) -> tuple[Split, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        part = self._parts[number]
        return part, index - (int(self._ends[number]) - len(part))


class MissingImages(Split):
    """Images that a table lists and that are not there: reading one raises its error, so that it is recorded as a bad image."""

    def __init__(self, bad: Sequence[BadImage]) -> None:
        self.name, self.task, self.classes = "missing", "unlabelled", ()
        self.targets = np.empty((len(bad), 0), np.float32)
        self._names, self._reasons = (PackedStrings(getattr(one, part) for one in bad) for part in ("name", "reason"))

    def image_name(self, index: int) -> str:
        return self._names[index]

    def payload(self, index: int) -> Payload:
        raise BadImage(self._names[index], self._reasons[index], kind="missing")
