"""`digits`: scikit-learn's 1,797 handwritten digits of 8×8 pixels, which need no file and no network."""

from __future__ import annotations

import numpy as np

from vitrail.data.sources.reference import Opened, Request
from vitrail.data.split import renamed, stratified
from vitrail.data.types import Array, Payload, Split, Task


class ArraySplit(Split):
    """Decoded images of one size in memory."""

    def __init__(self, name: str, task: Task, images: Array, targets: Array, classes: tuple[str, ...], prefix: str) -> None:
        self.name, self.task, self.targets, self.classes = name, task, targets, classes
        self._images, self._prefix = images, prefix

    def image_name(self, index: int) -> str:
        return f"{self._prefix}-{index % len(self):06d}"

    def payload(self, index: int) -> Payload:
        image: Array = self._images[index]
        return image

    @property
    def arrays(self) -> Array | None:
        return self._images


def open_digits(request: Request) -> Opened:
    """A fifth of each digit is held out as `val`, always the same images whatever the seed, so that figures compare."""
    request.allow()
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, :, :, None]
    classes = tuple(str(name) for name in bunch.target_names)
    whole = ArraySplit("train", "classify", images, bunch.target.astype(np.int64), classes, "digit")
    val = stratified(whole, 0.2, seed=0)
    train = np.setdiff1d(np.arange(len(whole)), val)
    return Opened(
        splits={"train": renamed(whole.subset(train), "train"), "val": renamed(whole.subset(val), "val")},
        detail="8×8 grey images embedded in scikit-learn",
    )
