"""The words the data room speaks: a source has splits, a split has images and targets.

A split is made to be held many times over: it pickles into a freshly spawned worker, keeps names and targets in a few
flat arrays rather than millions of Python objects, and reads an image only when asked for that one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.errors import VitrailError

Task = Literal["classify", "multilabel", "regress", "unlabelled"]
Array = npt.NDArray[Any]
Payload = bytes | Array
"""An encoded file as it lies on the disk, or a decoded image as uint8 or uint16 [height, width, channels]."""


class BadImage(VitrailError):
    """One image that cannot be used. It knows which and why, so that a loader may skip and list exactly these."""

    def __init__(self, name: str, fault: str, advice: str = "Replace or remove it, or pass --bad-images skip.") -> None:
        super().__init__(f"{name}: {fault}. {advice}")
        self.name, self.fault, self.advice = name, fault, advice

    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str, str]]:
        return type(self), (self.name, self.fault, self.advice)  # it must survive the way out of a worker process


class Split(ABC):
    """One split of a source: images by position, each with a unique name and a row of `targets`."""

    name: str
    task: Task
    classes: tuple[str, ...]
    """Class names in the order of their indices; for a regression the names of the targets."""
    targets: Array
    """Classify: int64 [N]. Multilabel: float32 [N, classes] of 0 and 1. Regress: float32 [N, K]. Unlabelled: [N, 0]."""

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def image_name(self, index: int) -> str:
        """The path or key of an image, unique within the split."""

    @abstractmethod
    def payload(self, index: int) -> Payload:
        """The image itself, encoded or decoded. What cannot be read raises `BadImage`."""

    @property
    def arrays(self) -> Array | None:
        """All images as one uint8 array [N, height, width, channels] where they have a common size, else None."""
        return None

    def subset(self, indices: Sequence[int] | Array) -> Split:
        """The images at these positions, in this order."""
        return Subset(self, np.asarray(indices, dtype=np.int64))


class Subset(Split):
    """A view on some images of another split, with the same classes."""

    def __init__(self, whole: Split, indices: Array) -> None:
        # A subset of a subset looks straight into the whole.
        self.whole: Split = whole.whole if isinstance(whole, Subset) else whole
        self.indices: Array = whole.indices[indices] if isinstance(whole, Subset) else indices
        self.name, self.task, self.classes = whole.name, whole.task, whole.classes
        self.targets = whole.targets[indices]

    def image_name(self, index: int) -> str:
        return self.whole.image_name(int(self.indices[index]))

    def payload(self, index: int) -> Payload:
        return self.whole.payload(int(self.indices[index]))

    @property
    def arrays(self) -> Array | None:
        """Only an unbroken run can be a view on a memory-mapped array; copying another choice could fill the memory."""
        everything = self.whole.arrays
        if everything is None or len(self.indices) == 0:
            return None
        first = int(self.indices[0])
        unbroken = bool((self.indices == np.arange(first, first + len(self.indices))).all())
        return everything[first : first + len(self.indices)] if unbroken else None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Everything one reference such as `folder:photos` stands for."""

    reference: str
    kind: str
    splits: dict[str, Split]
    detail: str = ""
    """What was recognised, in a few words: the layout of a folder, the columns of a table."""
    left_out: tuple[BadImage, ...] = field(default=())
    """Images refused while opening, when bad images are to be skipped."""

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
        """One line for the log: what was recognised, and how much of it."""
        sizes = ", ".join(f"{name} {len(split):,}" for name, split in self.splits.items())
        labels = {
            "classify": f"{len(self.classes)} classes",
            "multilabel": f"{len(self.classes)} labels, several an image",
            "regress": counted(len(self.classes), "numeric target"),
            "unlabelled": "no labels",
        }[self.task]
        skipped = f"; {counted(len(self.left_out), 'image')} left out" if self.left_out else ""
        return f"{self.kind}{f' ({self.detail})' if self.detail else ''}: {sizes} images; {labels}{skipped}"


def counted(count: int, noun: str) -> str:
    """`1 image`, `2,000 images`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


class Names:
    """A list of strings as one block of bytes: a tenth of the memory of Python's own, and pickled in one piece."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._block = b"".join(encoded)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    @classmethod
    def from_arrays(cls, block: Array, ends: Array) -> Names:
        """The inverse of `to_arrays`."""
        names = cls.__new__(cls)
        names._block, names._ends = block.tobytes(), ends
        return names

    def to_arrays(self) -> tuple[Array, Array]:
        """(bytes, where each name ends), for a file."""
        return np.frombuffer(self._block, np.uint8), self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        end = int(self._ends[index])
        start = int(self._ends[index - 1]) if index % len(self._ends) else 0
        return self._block[start:end].decode("utf-8", "surrogateescape")
