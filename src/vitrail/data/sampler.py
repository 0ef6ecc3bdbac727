"""Which images come when: the order of an epoch, and its division into steps, ranks and micro-batches.

The order depends on (seed, epoch) alone. A global batch is a run of positions in it; a rank's share is a run of the
batch, a micro-batch a run of the share. So any number of ranks or micro-batches sees the same global batches.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from vitrail.data.augment.streams import Stream, generator
from vitrail.data.types import Array, Split
from vitrail.errors import VitrailError, nearest

Sampling = Literal["shuffle", "balanced", "in-order"]


@dataclass(frozen=True)
class Slice:
    """One micro-batch of one rank: which images, and where they stand in the epoch."""

    epoch: int
    step: int
    part: int
    parts: int
    """The step's gradient is the sum over `parts` micro-batches of every rank."""
    indices: Array
    """Positions in the split."""
    runs: tuple[tuple[int, int], ...]
    """The same images' places in the epoch, as (first, count): what all random numbers are keyed by."""
    offset: int
    """Where the slice begins in its global batch."""
    count: int
    """Images to learn from. One more is read ahead of them when they are mixed and their first partner lies outside."""
    total: int
    """Images in the global batch."""

    @property
    def has_neighbour(self) -> bool:
        return len(self.indices) > self.count


class EpochOrder:
    """The order of every epoch of a split, cut into global batches."""

    def __init__(
        self,
        split: Split,
        *,
        batch: int,
        seed: int = 0,
        sampling: Sampling = "shuffle",
        repeats: int = 1,
        keep_last: bool = False,
    ) -> None:
        if sampling not in get_args(Sampling):
            raise VitrailError(
                f"There is no sampler {sampling!r}.{nearest(sampling, get_args(Sampling))} "
                f"There are {', '.join(get_args(Sampling))}."
            )
        if batch < 1:
            raise VitrailError(f"A batch of {batch} images cannot be trained on; it must be at least 1.")
        self.length, self.batch, self.seed = len(split), batch, seed
        self.sampling, self.repeats, self.keep_last = sampling, repeats, keep_last
        self._targets = _one_class_each(split) if sampling == "balanced" else None
        if self.steps == 0:
            raise VitrailError(
                f"0 optimiser steps per epoch: {self.length} images < batch {batch}. "
                "Use a smaller batch, more images, or keep the last, smaller batch (keep_last)."
            )
        self._cached: tuple[int, Array] | None = None

    @property
    def steps(self) -> int:
        """Optimiser steps in an epoch. Repeats do not lengthen it: it then sees fewer images, each several times."""
        return -(-self.length // self.batch) if self.keep_last else self.length // self.batch

    def epoch(self, epoch: int) -> Array:
        """The epoch's images in order, before repeats."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._order(epoch))
        return self._cached[1]

    def global_batch(self, epoch: int, step: int) -> Array:
        """The images of one optimiser step, over all ranks."""
        order = self.epoch(epoch)
        size = min(self.batch, self.length - step * self.batch)
        if self.repeats == 1:
            return order[step * self.batch : step * self.batch + size]
        # Copies stand apart, so that mixing with the neighbour does not mix an image with itself.
        different = -(-self.batch // self.repeats)
        return order[step * different + np.arange(size) % different]

    def _order(self, epoch: int) -> Array:
        chance = generator(self.seed, epoch, Stream.ORDER)
        if self.sampling == "in-order":
            return np.arange(self.length)
        if self._targets is None:
            return chance.permutation(self.length)
        return _balanced(self._targets, self.length, chance)


def slices(
    order: EpochOrder,
    *,
    epoch: int,
    step: int,
    rank: int = 0,
    ranks: int = 1,
    micro_batch: int | None = None,
    neighbour: bool = False,
) -> Iterator[Slice]:
    """One rank's micro-batches of one step. Shares differ by at most one image where the batch does not divide."""
    images = order.global_batch(epoch, step)
    total, base = len(images), step * order.batch
    if total < ranks:
        raise VitrailError(f"A batch of {total} images cannot be shared by {ranks} ranks; use a larger batch.")
    start, stop = total * rank // ranks, total * (rank + 1) // ranks
    largest = -(-total // ranks)
    # Every rank takes the same number of parts, or those with fewer would leave the others waiting.
    parts = min(-(-largest // min(micro_batch or largest, largest)), total // ranks)
    for part in range(parts):
        first = start + (stop - start) * part // parts
        last = start + (stop - start) * (part + 1) // parts
        places: tuple[tuple[int, int], ...] = ((base + first, last - first),)
        chosen = images[first:last]
        if neighbour and last - first < total:
            before = (first - 1) % total
            chosen = np.concatenate([images[before : before + 1], chosen])
            places = ((base + before, 1), *places) if first == 0 else ((base + before, last - before),)
        yield Slice(epoch, step, part, parts, chosen, places, first, last - first, total)


def class_weights(split: Split, weights: str | Path | dict[str, float] | None, *, sampling: Sampling = "shuffle") -> Array | None:
    """A weight for the loss of each class: `auto` (inversely to its count, mean 1 over images), a JSON file or a dict.

    The dict or file gives weights by class name; a class left out counts 1.
    """
    if weights is None:
        return None
    if sampling == "balanced":
        warnings.warn(
            "Class weights and the balanced sampler are both on: rare classes count twice over. One of them is enough.",
            stacklevel=2,
        )
    if weights == "auto":
        counts = np.bincount(_one_class_each(split), minlength=len(split.classes))
        present = counts > 0
        result = np.zeros(len(counts), dtype=np.float32)
        result[present] = len(split) / (present.sum() * counts[present])
        return result
    by_name = weights if isinstance(weights, dict) else _weights_file(Path(weights))
    unknown = sorted(set(by_name) - set(split.classes))
    if unknown:
        raise VitrailError(f"Weight for unknown class {unknown[0]!r}.{nearest(unknown[0], split.classes)}")
    return np.array([by_name.get(name, 1.0) for name in split.classes], dtype=np.float32)


def _weights_file(path: Path) -> dict[str, float]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in values.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise VitrailError(
            f'Cannot read class weights from {path} ({error}). Give `auto`, or a JSON file such as {{"cat": 1.0, "lynx": 8.5}}.'
        ) from error


def _one_class_each(split: Split) -> Array:
    if split.task != "classify":
        raise VitrailError(
            f"Balancing needs one class an image, and this data is for the task {split.task!r}. Use the shuffle sampler."
        )
    return split.targets


def _balanced(targets: Array, length: int, chance: np.random.Generator) -> Array:
    """As many images of each class as of any other; within a class each is used about equally often."""
    by_class = np.argsort(targets, kind="stable")
    present, counts = np.unique(targets, return_counts=True)
    members = np.split(by_class, np.cumsum(counts)[:-1])
    quotas = np.full(len(present), length // len(present))
    quotas[chance.permutation(len(present))[: length % len(present)]] += 1
    drawn = []
    for own, quota in zip(members, quotas, strict=True):
        rounds = [chance.permutation(own) for _ in range(-(-int(quota) // len(own)))]
        drawn.append(np.concatenate(rounds)[:quota] if rounds else own[:0])
    return chance.permutation(np.concatenate(drawn))
