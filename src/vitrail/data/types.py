"""The types of this package: a source has splits, a split has images and targets.

Every worker holds a copy of the split. So it can be pickled, stores names and targets in a few flat arrays instead of
millions of Python objects, and reads an image only when it is requested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.errors import VitrailError, counted
from vitrail.text import to_bytes

Task = Literal["classify", "multilabel", "regress", "unlabelled"]
Array = npt.NDArray[Any]
Payload = bytes | Array
"""The bytes of an encoded file, or a decoded image as uint8 or uint16 [height, width, channels]."""


class BadImage(VitrailError):
    """An image that cannot be used, with its name and the reason, so that a loader can skip and list it."""

    def __init__(
        self,
        name: str,
        reason: str,
        advice: str = "Replace or remove it.",
        kind: Literal["unreadable", "missing", "special-file", "unread-format"] = "unreadable",
        index: int | None = None,
    ) -> None:
        super().__init__(f"{name}: {reason}. {advice}")
        self.name, self.reason, self.advice, self.kind = name, reason, advice, kind
        self.index = index  # position in the split, set by the reader

    def skippable(self) -> BadImage:
        """Return the error with the advice of a loader, which can skip the image."""
        advice = f"{self.advice.removesuffix('.')}, or pass --bad-images skip."
        return BadImage(self.name, self.reason, advice, self.kind, self.index)

    def __reduce__(self) -> tuple[type[BadImage], tuple[str | int | None, ...]]:
        return type(self), (self.name, self.reason, self.advice, self.kind, self.index)  # pickled when a worker returns it


class Split(ABC):
    """One split of a source: a sequence of images, each with a unique name and a row of `targets`."""

    name: str
    task: Task
    classes: tuple[str, ...]
    """Class names in index order; for regression the names of the targets."""
    targets: Array
    """Classify: int64 [N]. Multilabel: float32 [N, classes] of 0 and 1. Regress: float32 [N, K]. Unlabelled: [N, 0]."""

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def image_name(self, index: int) -> str:
        """Return the path or key of an image, unique within the split."""

    @abstractmethod
    def payload(self, index: int) -> Payload:
        """Return the image, encoded or decoded. Raise `BadImage` if it cannot be read."""

    def read_ahead(self, indices: Array) -> None:  # noqa: B027 - most splits have nothing to do
        """Begin to read these images in the background, if reading them is mostly waiting; `payload` then returns sooner."""

    @property
    def arrays(self) -> Array | None:
        """All images as one uint8 array [N, height, width, channels], if they are stored that way, else None."""
        return None

    @property
    def packed_names(self) -> PackedStrings | None:
        """What distinguishes the images of this split, without a loop over them, if it is stored that way; else None."""
        return None

    def subset(self, indices: Sequence[int] | Array) -> Split:
        """Return the images at these positions, in this order."""
        return Subset(self, np.asarray(indices, dtype=np.int64))


class Subset(Split):
    """Some images of another split, with the same classes."""

    def __init__(self, parent: Split, indices: Array) -> None:
        # A subset of a subset refers to the original split, so that lookups do not chain.
        self.parent: Split = parent.parent if isinstance(parent, Subset) else parent
        self.indices: Array = parent.indices[indices] if isinstance(parent, Subset) else indices
        self.name, self.task, self.classes = parent.name, parent.task, parent.classes
        self.targets = parent.targets[indices]

    def image_name(self, index: int) -> str:
        return self.parent.image_name(int(self.indices[index]))

    def payload(self, index: int) -> Payload:
        return self.parent.payload(int(self.indices[index]))

    def read_ahead(self, indices: Array) -> None:
        self.parent.read_ahead(self.indices[indices])

    @property
    def arrays(self) -> Array | None:
        """Only a contiguous range can be a view of a memory-mapped array; a copy might not fit in memory."""
        everything = self.parent.arrays
        if everything is None or len(self.indices) == 0:
            return None
        first = int(self.indices[0])
        contiguous = bool((self.indices == np.arange(first, first + len(self.indices))).all())
        return everything[first : first + len(self.indices)] if contiguous else None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset opened from a reference such as `folder:photos`."""

    reference: str
    kind: str
    splits: dict[str, Split]
    detail: str = ""
    """What was recognised, for example the layout of a folder or the columns of a table."""
    skipped: tuple[BadImage, ...] = field(default=())
    """Images skipped while opening with `bad_images="skip"`."""
    rule: str | None = None
    """The rule by which `val` was held out of `train`; None if the source has its own splits."""
    made_from: str | None = None
    """Of a packed dataset: the reference it was packed from."""

    @property
    def task(self) -> Task:
        return next(iter(self.splits.values())).task

    @property
    def classes(self) -> tuple[str, ...]:
        return next(iter(self.splits.values())).classes

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise VitrailError(f"{self.reference} has no split {name!r}; it has {', '.join(self.splits)}.")
        return self.splits[name]

    def describe(self) -> str:
        """Return one line for the log: what was recognised, and the number of images."""
        sizes = ", ".join(f"{name} {len(split):,}" for name, split in self.splits.items())
        labels = {
            "classify": counted(len(self.classes), "class", "classes"),
            "multilabel": f"{counted(len(self.classes), 'label')}, several per image",
            "regress": counted(len(self.classes), "numeric target"),
            "unlabelled": "no labels",
        }[self.task]
        skipped = f"; {counted(len(self.skipped), 'image')} skipped" if self.skipped else ""
        return f"{self.kind}{f' ({self.detail})' if self.detail else ''}: {sizes} images; {labels}{skipped}"


class PackedStrings:
    """A list of strings in one bytes object: a tenth of the memory of a Python list, and fast to pickle."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [to_bytes(string) for string in strings]
        self._block = b"".join(encoded)
        self._ends = np.cumsum([len(string) for string in encoded], dtype=np.int64)

    @classmethod
    def from_arrays(cls, block: Array, ends: Array) -> PackedStrings:
        """Invert `to_arrays`."""
        strings = cls.__new__(cls)
        strings._block, strings._ends = block.tobytes(), ends
        return strings

    def to_arrays(self) -> tuple[Array, Array]:
        """Return (bytes, end offset of each string), to store in a file."""
        return np.frombuffer(self._block, np.uint8), self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        end = int(self._ends[index])
        start = int(self._ends[index - 1]) if index % len(self._ends) else 0
        return self._block[start:end].decode("utf-8", "surrogateescape")
