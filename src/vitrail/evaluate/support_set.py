"""Draw the support sets of few-shot evaluation: exactly k images per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitrail.errors import VitrailError, counted
from vitrail.evaluate.settings import SmallClasses

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SupportSet:
    """The support set for one number of shots and one seed."""

    shots: int
    seed: int
    indices: Indices  # positions in the split, class by class
    classes: Indices  # the classes in use, ascending
    dropped: Indices  # the classes dropped because they have too few images


def draw_support_sets(
    targets: Indices, classes: Sequence[str], *, shots: Sequence[int], seeds: Sequence[int], small_classes: SmallClasses = "error"
) -> list[SupportSet]:
    """Draw one support set for each seed and number of shots. Within a seed they are nested: the 5 are among the 10.

    As in the reference code, numpy's default generator permutes the images of one class after the other. A class without any
    image in the split is ignored. A class with fewer than k images is an error, or is dropped for that k.
    """
    if not shots or min(shots) < 1:
        raise VitrailError(f"shots is {list(shots)}; each must be a number of images per class, 1 or more.")
    counts = np.bincount(targets, minlength=len(classes))
    present = np.flatnonzero(counts)
    if small_classes == "error":
        _refuse_small_classes(counts, classes, present, max(shots))
    support_sets = []
    for seed in seeds:
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(np.flatnonzero(targets == one)) for one in range(len(classes))]
        for k in shots:
            used = present[counts[present] >= k]
            if len(used) < 2:
                raise VitrailError(
                    f"Classes with at least {counted(k, 'image')}: {len(used)} of {len(present)}. "
                    "A classifier needs at least 2. Use fewer shots."
                )
            indices = np.concatenate([orders[one][:k] for one in used]).astype(np.int64)
            support_sets.append(SupportSet(k, seed, indices, used, np.setdiff1d(present, used)))
    return support_sets


def _refuse_small_classes(counts: Indices, classes: Sequence[str], present: Indices, shots: int) -> None:
    small = present[counts[present] < shots]
    if not len(small):
        return
    first, more = int(small[0]), len(small) - 1
    others = "" if not more else " 1 more class is also too small." if more == 1 else f" {more} more classes are also too small."
    raise VitrailError(
        f"Class {classes[first]!r} has {counted(int(counts[first]), 'image')}, fewer than {shots} shots.{others} "
        "Use fewer --shots, or pass --small-classes drop to leave such classes out."
    )
