"""Finding images that are in two splits: the same bytes, or the same picture saved, scaled or brightened anew.

The perceptual hash is the sign of 64 low frequencies of a 32×32 grey thumbnail (cosine transform, without the mean).
Two hashes that differ in at most seven bits agree wholly in one of eight bytes, so only pairs that share a byte are
compared: about a second for a hundred thousand images against ten thousand. A pair so found is confirmed on the
thumbnails themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vitrail.data.types import Array

MOST_BITS = 7
LEAST_CORRELATION = 0.97
_CHUNK = 4_000_000
_COSINES = np.stack([np.cos(np.pi * (2 * np.arange(32) + 1) * k / 64) for k in range(8)]).astype(np.float32)
_BITS = np.array([bin(value).count("1") for value in range(65536)], np.uint8)


def fingerprints(thumbnails: Array) -> tuple[Array, Array]:
    """(hashes uint64 [N], smaller thumbnails uint8 [N, 256]) of grey thumbnails [N, 32, 32]: all that need be kept."""
    waves = np.einsum("kh,nhw,lw->nkl", _COSINES, thumbnails.astype(np.float32), _COSINES, optimize=True)
    waves = waves.reshape(-1, 64)
    waves[:, 0] = 0  # brightness is no part of what an image shows
    bits = waves > np.median(waves[:, 1:], axis=1, keepdims=True)
    # 16×16 is coarse enough to forgive another codec, and fine enough to tell two skies apart.
    small = np.rint(thumbnails.reshape(-1, 16, 2, 16, 2).mean((2, 4), dtype=np.float32)).astype(np.uint8)
    return np.packbits(bits, axis=1).view(np.uint64).reshape(-1), small.reshape(-1, 256)


def same_content(first: Array, second: Array) -> Array:
    """Pairs of positions [P, 2] at which two lists of digests agree; each position of `second` is named once."""
    order = np.argsort(first, kind="stable")
    place = np.searchsorted(first[order], second)
    inside = np.minimum(place, len(first) - 1)
    equal = np.flatnonzero(first[order[inside]] == second) if len(first) else np.empty(0, np.int64)
    return np.column_stack([order[inside[equal]], equal]) if len(equal) else np.empty((0, 2), np.int64)


def same_picture(first: tuple[Array, Array], second: tuple[Array, Array]) -> Array:
    """Pairs of positions [P, 2] that show nearly the same; each side is what `fingerprints` gave."""
    pairs = [pairs for byte in range(8) for pairs in _alike_in_byte(first[0], second[0], byte)]
    if not pairs:
        return np.empty((0, 2), np.int64)
    found = np.unique(np.concatenate(pairs), axis=0)
    alike = [_correlation(first[1][part[:, 0]], second[1][part[:, 1]]) for part in np.array_split(found, len(found) // 50_000 + 1)]
    return found[np.concatenate(alike) >= LEAST_CORRELATION]


def _alike_in_byte(first: Array, second: Array, byte: int) -> Iterator[Array]:
    """Pairs that agree in one byte and differ in few bits, in portions that fit the memory."""
    keys, probes = (hashes.view(np.uint8).reshape(-1, 8)[:, byte] for hashes in (first, second))
    order = np.argsort(keys, kind="stable")
    starts = np.searchsorted(keys[order], np.arange(257))
    for value in range(256):
        left = order[starts[value] : starts[value + 1]]
        right = np.flatnonzero(probes == value)
        rows = max(1, _CHUNK // max(1, len(left)))
        for begin in range(0, len(right), rows):
            part = right[begin : begin + rows]
            distance = _distance(first[left][None], second[part][:, None])
            which, there = np.nonzero(distance <= MOST_BITS)
            if len(which):
                yield np.column_stack([left[there], part[which]])


def _distance(first: Array, second: Array) -> Array:
    words = np.ascontiguousarray(first ^ second).view(np.uint16).reshape(*np.broadcast_shapes(first.shape, second.shape), 4)
    return np.asarray(_BITS[words].sum(-1, dtype=np.uint8))


def _correlation(first: Array, second: Array) -> Array:
    a, b = (rows.astype(np.float32) - rows.mean(1, dtype=np.float32, keepdims=True) for rows in (first, second))
    product = (a * b).sum(1)
    scale = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    flat = scale < 1e-3  # two images of one colour each
    same_grey = np.abs(first.mean(1) - second.mean(1)) < 2
    return np.asarray(np.where(flat, same_grey, product / np.maximum(scale, 1e-3)))
