"""The analysed images that a server keeps, and the images it offers before any upload."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from vitrail.data import embedded
from vitrail.serve.errors import ServiceError
from vitrail.serve.exploration import Exploration

MAX_IMAGES = 24
MAX_BYTES = 768 << 20


@dataclass(frozen=True)
class NamedImage:
    """An image that the page offers: the bytes of its file."""

    name: str
    data: bytes


class Explorations:
    """Analysed images by id, the least recently used removed first. Used by the event loop alone."""

    def __init__(self, images: int = MAX_IMAGES, size: int = MAX_BYTES) -> None:
        self._images, self._size = images, size
        self._kept: OrderedDict[str, Exploration] = OrderedDict()

    def find(self, key: str) -> Exploration | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def __getitem__(self, key: str) -> Exploration:
        found = self.find(key)
        if found is None:
            raise ServiceError(404, "This image is no longer kept; send it again.")
        return found

    def add(self, key: str, exploration: Exploration) -> None:
        """Keep an image; the newest always stays, whatever its size."""
        self._kept[key] = exploration
        self._kept.move_to_end(key)
        self.shrink()

    def shrink(self) -> None:
        """Remove images until the others fit: one of a large model grows when a layer of it is computed."""
        while len(self._kept) > 1 and (len(self._kept) > self._images or self.nbytes > self._size):
            self._kept.popitem(last=False)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)


def content_key(model: str, data: bytes) -> str:
    """Return the id of an image analysed by a model: the same content has the same id."""
    return hashlib.sha256(model.encode() + b"\0" + data).hexdigest()[:32]


def example_images() -> tuple[NamedImage, ...]:
    """Return the two embedded photos."""
    return tuple(NamedImage(name, embedded.photo(name)) for name in embedded.PHOTOS)
