"""Which images a few-shot classifier learns from: exactly k of each class, drawn by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitrail.errors import VitrailError

Indices = npt.NDArray[np.int64]
ShortClass = Literal["fail", "drop"]


@dataclass(frozen=True)
class Choice:
    """The support set of one number of shots and one seed."""

    shots: int
    seed: int
    indices: Indices  # positions in the split, class by class
    classes: Indices  # the class numbers taking part, ascending
    dropped: Indices  # those left out for having too few images


def choose_shots(
    targets: Indices, classes: Sequence[str], *, shots: Sequence[int], seeds: Sequence[int], short_class: ShortClass = "fail"
) -> list[Choice]:
    """One choice for each number of shots and seed. Within a seed they are nested: the 5 are among the 10.

    As in the reference, numpy's default generator permutes the images of one class after the other. A class with no image at
    all in the split is never part of the problem; one with fewer than k fails, or is dropped for that k.
    """
    if not shots or min(shots) < 1:
        raise VitrailError(f"shots are {list(shots)}; each is a number of images a class, 1 or more.")
    counts = np.bincount(targets, minlength=len(classes))
    present = np.flatnonzero(counts)
    _refuse_short(counts, classes, present, max(shots), short_class)
    chosen = []
    for seed in seeds:
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(np.flatnonzero(targets == one)) for one in range(len(classes))]
        for k in shots:
            enough = present[counts[present] >= k]
            if len(enough) < 2:
                raise VitrailError(
                    f"Only {len(enough)} of {len(present)} classes have {k} images; a classifier needs two. Ask for fewer shots."
                )
            indices = np.concatenate([orders[one][:k] for one in enough]).astype(np.int64)
            chosen.append(Choice(k, seed, indices, enough, np.setdiff1d(present, enough)))
    return chosen


def _refuse_short(counts: Indices, classes: Sequence[str], present: Indices, most: int, short_class: ShortClass) -> None:
    short = present[counts[present] < most]
    if short_class == "drop" or not len(short):
        return
    first = int(short[0])
    others = f" So have {len(short) - 1} more classes too few." if len(short) > 1 else ""
    raise VitrailError(
        f"class {classes[first]!r} has {counts[first]} < {most} images.{others} "
        "Ask for fewer --shots, or pass --short-class drop to leave such classes out where they fall short."
    )
