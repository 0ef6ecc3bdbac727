"""`digits`: scikit-learn's 1,797 handwritten digits of 8×8 pixels; needs no file and no network.

`digits?classes=0-4` is a part of them, so that one can pre-train on some digits and transfer to others.
"""

from __future__ import annotations

import numpy as np

from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.split import rename, stratified
from vitrail.errors import VitrailError


def open_digits(request: Request) -> OpenResult:
    """Hold out a fifth of each digit as `val`: always the same images, so that results are comparable."""
    request.allow_options("classes")
    first, last = _class_range(request)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, :, :, None]
    classes = tuple(str(name) for name in bunch.target_names)[first : last + 1]
    kept = np.flatnonzero((bunch.target >= first) & (bunch.target <= last))
    digits = ArraySplit("train", "classify", images[kept], bunch.target[kept].astype(np.int64) - first, classes, numbers=kept)
    val = stratified(digits, 0.2, seed=0)
    train = np.setdiff1d(np.arange(len(digits)), val)
    return OpenResult(
        splits={"train": rename(digits.subset(train), "train"), "val": rename(digits.subset(val), "val")},
        detail="8×8 grey images embedded in scikit-learn",
    )


def _class_range(request: Request) -> tuple[int, int]:
    text = request.options.get("classes", "0-9")
    first, dash, last = text.partition("-")
    digits = tuple(map(str, range(10)))
    if not dash or first not in digits or last not in digits or int(first) >= int(last):
        raise VitrailError(f"classes={text} in {request.reference}: a range of digits such as 0-4 is expected.")
    return int(first), int(last)
