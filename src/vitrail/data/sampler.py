"""Order the images of an epoch, and divide it into steps, ranks and micro-batches.

The order depends on (seed, epoch) alone. A global batch is a contiguous range of it, a rank gets a contiguous range of the
batch, and a micro-batch is a contiguous range of that. So the global batches are the same for any number of ranks or
micro-batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from vitrail.data.augment.rng import Purpose, generator
from vitrail.data.classes import abbreviate
from vitrail.data.types import Array, Split
from vitrail.errors import VitrailError, counted, did_you_mean, reason_of
from vitrail.regular_files import read_json_object

Sampling = Literal["shuffle", "balanced", "in-order"]


@dataclass(frozen=True)
class BatchSlice:
    """One micro-batch of one rank: the indices of its images, and their positions in the epoch."""

    epoch: int
    step: int
    micro_step: int
    micro_steps: int
    """The gradient of the step is the sum over `micro_steps` micro-batches on every rank."""
    indices: Array
    """Positions in the split."""
    ranges: tuple[tuple[int, int], ...]
    """Positions of the same images in the epoch, as (first, count): all random numbers are keyed by them."""
    offset: int
    """Position of the first image in the global batch."""
    count: int
    """Images to train on. `indices` has one more in front if images are mixed and the first one's partner is outside."""
    total: int
    """Images in the global batch."""

    @property
    def has_partner(self) -> bool:
        """Whether the first image is only there as the partner that the second one is mixed with."""
        return len(self.indices) > self.count


class EpochOrder:
    """The order of every epoch of a split, divided into global batches."""

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
                f"There is no sampler {sampling!r}.{did_you_mean(sampling, get_args(Sampling))} "
                f"There are {', '.join(get_args(Sampling))}."
            )
        if batch < 1:
            raise VitrailError(f"The batch size is {batch}; it must be at least 1.")
        self.length, self.batch, self.seed = len(split), batch, seed
        self.sampling, self.repeats, self.keep_last = sampling, repeats, keep_last
        self._targets = _class_targets(split) if sampling == "balanced" else None
        if self.steps == 0:
            raise VitrailError(
                f"0 optimiser steps per epoch: {counted(self.length, 'image')} < batch {batch}. "
                "Use a smaller batch, more images, or keep the last, smaller batch (keep_last)."
            )
        self._cached: tuple[int, Array] | None = None

    @property
    def steps(self) -> int:
        """Optimiser steps per epoch. Repeats do not change it: an epoch then has fewer images, each several times."""
        return -(-self.length // self.batch) if self.keep_last else self.length // self.batch

    def epoch(self, epoch: int) -> Array:
        """Return the images of an epoch in order, before repeats."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._order(epoch))
        return self._cached[1]

    def global_batch(self, epoch: int, step: int) -> Array:
        """Return the images of one optimiser step, over all ranks."""
        order = self.epoch(epoch)
        size = min(self.batch, self.length - step * self.batch)
        if self.repeats == 1:
            return order[step * self.batch : step * self.batch + size]
        # Copies are not adjacent, so that an image is never mixed with itself.
        distinct = -(-self.batch // self.repeats)
        return order[step * distinct + np.arange(size) % distinct]

    def _order(self, epoch: int) -> Array:
        rng = generator(self.seed, epoch, Purpose.ORDER)
        if self.sampling == "in-order":
            return np.arange(self.length)
        if self._targets is None:
            return rng.permutation(self.length)
        return _balanced(self._targets, self.length, rng)


def batch_slices(
    order: EpochOrder,
    *,
    epoch: int,
    step: int,
    rank: int = 0,
    ranks: int = 1,
    micro_batch: int | None = None,
    with_partner: bool = False,
) -> Iterator[BatchSlice]:
    """Yield the micro-batches of one rank and step. Sizes differ by at most one image if the batch does not divide evenly.

    `with_partner` adds, in front, the image that the first one is mixed with.
    """
    images = order.global_batch(epoch, step)
    total, base = len(images), step * order.batch
    if total < ranks:
        raise VitrailError(f"A batch of {counted(total, 'image')} cannot be divided among {ranks} ranks. Use a larger batch.")
    start, stop = total * rank // ranks, total * (rank + 1) // ranks
    largest = -(-total // ranks)
    # Every rank needs the same number of micro-batches, or collectives would hang.
    micro_steps = min(-(-largest // min(micro_batch or largest, largest)), total // ranks)
    for micro_step in range(micro_steps):
        first = start + (stop - start) * micro_step // micro_steps
        last = start + (stop - start) * (micro_step + 1) // micro_steps
        ranges: tuple[tuple[int, int], ...] = ((base + first, last - first),)
        indices = images[first:last]
        if with_partner and last - first < total:
            before = (first - 1) % total
            indices = np.concatenate([images[before : before + 1], indices])
            ranges = ((base + before, 1), *ranges) if first == 0 else ((base + before, last - before),)
        yield BatchSlice(epoch, step, micro_step, micro_steps, indices, ranges, first, last - first, total)


def class_weights(split: Split, weights: str | Path | dict[str, float] | None, *, sampling: Sampling = "shuffle") -> Array | None:
    """Return the loss weight of each class: `auto` (inverse frequency, mean 1 over images), or from a JSON file or dict.

    The file or dict maps class names to weights; a class that is not listed gets 1.
    """
    if weights is None:
        return None
    if sampling == "balanced":
        warnings.warn(
            "Class weights and the balanced sampler are both on, so rare classes are weighted twice. Use one of them.",
            stacklevel=2,
        )
    if weights == "auto":
        counts = np.bincount(_class_targets(split), minlength=len(split.classes))
        present = counts > 0
        result = np.zeros(len(counts), dtype=np.float32)
        result[present] = len(split) / (present.sum() * counts[present])
        return result
    by_name = weights if isinstance(weights, dict) else _weights_file(Path(weights))
    unknown = sorted(set(by_name) - set(split.classes))
    if unknown:
        raise VitrailError(
            f"There is a weight for the class {unknown[0]!r}, which {split.name} does not have ({abbreviate(split.classes)})."
            f"{did_you_mean(unknown[0], split.classes)} Correct or remove it."
        )
    return np.array([by_name.get(name, 1.0) for name in split.classes], dtype=np.float32)


def _weights_file(path: Path) -> dict[str, float]:
    try:
        values = read_json_object(path)
        return {str(name): float(value) for name, value in values.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise VitrailError(
            f"Cannot read class weights from {path} ({reason_of(error)}). "
            'Pass `auto`, or a JSON file such as {"cat": 1.0, "lynx": 8.5}.'
        ) from error


def _class_targets(split: Split) -> Array:
    if split.task != "classify":
        raise VitrailError(
            f"Balancing needs one class per image, but this dataset has the task {split.task!r}. "
            "Use the shuffle sampler, without class weights."
        )
    return split.targets


def _balanced(targets: Array, length: int, rng: np.random.Generator) -> Array:
    """Draw equally many images of each class; within a class, each image about equally often."""
    by_class = np.argsort(targets, kind="stable")
    present, counts = np.unique(targets, return_counts=True)
    members = np.split(by_class, np.cumsum(counts)[:-1])
    quotas = np.full(len(present), length // len(present))
    quotas[rng.permutation(len(present))[: length % len(present)]] += 1
    drawn = []
    for own, quota in zip(members, quotas, strict=True):
        rounds = [rng.permutation(own) for _ in range(-(-int(quota) // len(own)))]
        drawn.append(np.concatenate(rounds)[:quota] if rounds else own[:0])
    return rng.permutation(np.concatenate(drawn))
