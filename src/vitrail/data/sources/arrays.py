"""Decoded images of one size, in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.data.types import Array, Payload, Split, Task


class ArraySplit(Split):
    """A split of a small dataset such as MNIST or CIFAR: all its images in one array."""

    def __init__(
        self,
        name: str,
        task: Task,
        images: Array,
        targets: Array,
        classes: tuple[str, ...],
        numbers: Array | None = None,
    ) -> None:
        self.name, self.task, self.targets, self.classes = name, task, targets, classes
        self._images = images
        self._numbers = np.arange(len(images)) if numbers is None else numbers

    def image_name(self, index: int) -> str:
        return f"{self._numbers[index]:06d}"

    def payload(self, index: int) -> Payload:
        image: Array = self._images[index]
        return image

    @property
    def arrays(self) -> Array | None:
        return self._images

    def subset(self, indices: Sequence[int] | Array) -> ArraySplit:
        chosen = np.asarray(indices, dtype=np.int64)
        return ArraySplit(self.name, self.task, self._images[chosen], self.targets[chosen], self.classes, self._numbers[chosen])
