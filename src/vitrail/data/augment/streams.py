"""Random numbers that depend on where they are used, and on nothing else.

Every draw is a function of (seed, epoch, stream, position in the epoch): a counter-based generator (Philox) is set to
that place and read. So a batch comes out the same whichever worker or rank makes it, and after any restart; nothing
reads or advances a global generator.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from vitrail.data.types import Array

Floats = npt.NDArray[np.float64]


class Stream(IntEnum):
    """What the numbers are for. Streams never share a number; a value, once released, keeps its meaning."""

    ORDER = 0
    CROP = 1
    FLIP = 2
    RANDAUGMENT = 3
    ERASE = 4
    MIX = 5
    SUBSTITUTE = 6


def uniforms(seed: int, epoch: int, stream: Stream, first: int, count: int, draws: int) -> Floats:
    """`draws` numbers in [0, 1) for each of the positions first … first + count − 1, as [count, draws]."""
    blocks = -(-draws // 4)  # Philox gives four numbers a counter value, and every position owns its own counters
    source = np.random.Philox(key=_key(seed, epoch, stream), counter=_words(first * blocks))
    numbers: Array = source.random_raw(count * blocks * 4).reshape(count, blocks * 4)[:, :draws]
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(seed: int, epoch: int, stream: Stream, item: int = 0) -> np.random.Generator:
    """A generator of its own for one item (an epoch's order, a step's mixing): for draws of unknown number."""
    # The upper half of the counter keeps its numbers apart from all that `uniforms` can reach.
    return np.random.Generator(np.random.Philox(key=_key(seed, epoch, stream), counter=_words(item, high=1)))


def _key(seed: int, epoch: int, stream: Stream) -> Array:
    return np.array([seed & (2**64 - 1), (epoch << 8 | stream) & (2**64 - 1)], dtype=np.uint64)


def _words(low: int, high: int = 0) -> Array:
    return np.array([0 if high else low, low if high else 0, 0, high], dtype=np.uint64)
