"""`digits`: scikit-learn's 1,797 handwritten digits of 8×8 pixels; needs no file and no network."""

from __future__ import annotations

import numpy as np

from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.split import rename, stratified


def open_digits(request: Request) -> OpenResult:
    """Hold out a fifth of each digit as `val`: always the same images, for any seed, so that results are comparable."""
    request.allow_options()
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, :, :, None]
    classes = tuple(str(name) for name in bunch.target_names)
    digits = ArraySplit("train", "classify", images, bunch.target.astype(np.int64), classes)
    val = stratified(digits, 0.2, seed=0)
    train = np.setdiff1d(np.arange(len(digits)), val)
    return OpenResult(
        splits={"train": rename(digits.subset(train), "train"), "val": rename(digits.subset(val), "val")},
        detail="8×8 grey images embedded in scikit-learn",
    )
