"""`digits`: 1,797 handwritten digits of 8×8 pixels, embedded in the package; needs no file and no network.

`digits?classes=0-4` is a part of them, so that one can pre-train on some digits and transfer to others.
"""

from __future__ import annotations

import numpy as np

from vitrail.data import embedded
from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.split import rename, stratified
from vitrail.errors import VitrailError


def open_digits(request: Request) -> OpenResult:
    """Hold out a fifth of each digit as `val`: always the same images, so that results are comparable."""
    request.allow_options("classes")
    first, last = _class_range(request)
    values, targets = embedded.digits()
    images = np.rint(values * (255 / 16)).astype(np.uint8)[:, :, :, None]
    classes = tuple(map(str, range(first, last + 1)))
    kept = np.flatnonzero((targets >= first) & (targets <= last))
    digits = ArraySplit("train", "classify", images[kept], targets[kept] - first, classes, numbers=kept)
    val = stratified(digits, 0.2, seed=0)
    train = np.setdiff1d(np.arange(len(digits)), val)
    return OpenResult(
        splits={"train": rename(digits.subset(train), "train"), "val": rename(digits.subset(val), "val")},
        detail="embedded 8×8 grey images",
    )


def _class_range(request: Request) -> tuple[int, int]:
    text = request.options.get("classes", "0-9")
    first, dash, last = text.partition("-")
    digits = tuple(map(str, range(10)))
    if not dash or first not in digits or last not in digits or int(first) >= int(last):
        raise VitrailError(f"classes={text} in {request.reference}: a range of digits such as 0-4 is expected.")
    return int(first), int(last)
