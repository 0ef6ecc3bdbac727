"""Random numbers that are a function of (seed, epoch, purpose, position in the epoch).

A counter-based generator (Philox) is set to that key and counter for each draw. So a batch is the same whichever worker
or rank builds it, and after any restart. No global generator is read or advanced.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from vitrail.data.types import Array

Floats = npt.NDArray[np.float64]


class Purpose(IntEnum):
    """What random numbers are used for. Each purpose has its own key. Do not renumber: it would change all runs."""

    ORDER = 0
    CROP = 1
    FLIP = 2
    RANDAUGMENT = 3
    ERASE = 4
    MIX = 5
    SUBSTITUTE = 6
    MAGNITUDE = 7
    THREE_AUGMENT = 8
    COLOUR_JITTER = 9


def uniforms(seed: int, epoch: int, purpose: Purpose, first: int, count: int, draws: int) -> Floats:
    """Draw `draws` numbers in [0, 1) for each of the positions first … first + count − 1, as [count, draws]."""
    blocks = -(-draws // 4)  # Philox gives four numbers per counter value; no two positions share a counter value
    source = np.random.Philox(key=_key(seed, epoch, purpose), counter=_words(first * blocks))
    numbers: Array = source.random_raw(count * blocks * 4).reshape(count, blocks * 4)[:, :draws]
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(seed: int, epoch: int, purpose: Purpose, item: int = 0) -> np.random.Generator:
    """Return a generator for one item (the order of an epoch, the mixing of a step), if the number of draws is unknown."""
    # `uniforms` never reaches the upper half of the counter, so the numbers do not overlap.
    return np.random.Generator(np.random.Philox(key=_key(seed, epoch, purpose), counter=_words(item, high=1)))


def _key(seed: int, epoch: int, purpose: Purpose) -> Array:
    return np.array([seed & (2**64 - 1), (epoch << 8 | purpose) & (2**64 - 1)], dtype=np.uint64)


def _words(low: int, high: int = 0) -> Array:
    return np.array([0 if high else low, low if high else 0, 0, high], dtype=np.uint64)
