"""`digits`: scikit-learn's 1,797 handwritten digits of 8×8 pixels, which need no file and no network."""

from __future__ import annotations

import numpy as np

from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.reference import Opened, Request
from vitrail.data.split import renamed, stratified


def open_digits(request: Request) -> Opened:
    """A fifth of each digit is held out as `val`, always the same images whatever the seed, so that figures compare."""
    request.allow()
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, :, :, None]
    classes = tuple(str(name) for name in bunch.target_names)
    whole = ArraySplit("train", "classify", images, bunch.target.astype(np.int64), classes)
    val = stratified(whole, 0.2, seed=0)
    train = np.setdiff1d(np.arange(len(whole)), val)
    return Opened(
        splits={"train": renamed(whole.subset(train), "train"), "val": renamed(whole.subset(val), "val")},
        detail="8×8 grey images embedded in scikit-learn",
    )
