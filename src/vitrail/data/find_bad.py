"""Decode the images of a split before training, so that all bad ones are named at once instead of one per attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vitrail.data.decode import decode, open_image, unwrap_npy
from vitrail.data.types import BadImage, Split

_BLOCK = 256


def find_bad(
    split: Split,
    *,
    workers: int,
    seconds: float | None = None,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[list[BadImage], int]:
    """Return (images that cannot be read, number of images looked at), in a random order until the time is over.

    `share` is (k, n): look at the k-th of n parts only.
    """
    end = None if seconds is None else time.monotonic() + seconds
    order, bad, done = np.random.default_rng(0).permutation(len(split))[share[0] :: share[1]], list[BadImage](), 0
    with ThreadPoolExecutor(workers) as pool:
        while done < len(order) and (end is None or time.monotonic() < end):
            block = order[done : done + _BLOCK].tolist()
            bad += [one for one in pool.map(lambda index: image_error(split, index), block) if one is not None]
            done += len(block)
            progress(len(block))
    return sorted(bad, key=lambda one: one.name), done


def image_error(split: Split, index: int) -> BadImage | None:
    """Return why an image cannot be read, or None. JPEGs are decoded at an eighth of their size, which still reads all of it."""
    name = split.image_name(index)
    try:
        payload = unwrap_npy(split.payload(index), name=name)
        if isinstance(payload, bytes):
            decode(open_image(payload, name=name)[0], channels=3, min_size=(64, 64), exif=False, name=name)
    except BadImage as error:
        return BadImage(name, error.reason)
    return None
