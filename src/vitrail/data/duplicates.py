"""Find images that are in two splits: the same bytes, or the same image saved again, resized or brightened.

The perceptual hash is the sign of 64 low frequencies of a 32×32 grey thumbnail (DCT, without the mean). Two hashes that
differ in at most seven bits have at least one of eight bytes in common, so only pairs with a common byte are compared:
about a second for a hundred thousand images against ten thousand. Each pair is then confirmed on the thumbnails.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vitrail.data.types import Array

MAX_BITS = 7
MIN_CORRELATION = 0.97
_CHUNK = 4_000_000
_DCT = np.stack([np.cos(np.pi * (2 * np.arange(32) + 1) * k / 64) for k in range(8)]).astype(np.float32)
_BIT_COUNTS = np.array([bin(value).count("1") for value in range(65536)], np.uint8)


def fingerprints(thumbnails: Array) -> tuple[Array, Array]:
    """Return (hashes uint64 [N], smaller thumbnails uint8 [N, 256]) of grey thumbnails [N, 32, 32]."""
    frequencies = np.einsum("kh,nhw,lw->nkl", _DCT, thumbnails.astype(np.float32), _DCT, optimize=True)
    frequencies = frequencies.reshape(-1, 64)
    frequencies[:, 0] = 0  # ignore brightness
    bits = frequencies > np.median(frequencies[:, 1:], axis=1, keepdims=True)
    # 16×16 is coarse enough to ignore another codec, and fine enough to tell two similar skies apart.
    small = np.rint(thumbnails.reshape(-1, 16, 2, 16, 2).mean((2, 4), dtype=np.float32)).astype(np.uint8)
    return np.packbits(bits, axis=1).view(np.uint64).reshape(-1), small.reshape(-1, 256)


def exact_pairs(first: Array, second: Array) -> Array:
    """Return pairs of positions [P, 2] with equal digests; each position of `second` appears at most once."""
    order = np.argsort(first, kind="stable")
    found = np.searchsorted(first[order], second)
    inside = np.minimum(found, len(first) - 1)
    equal = np.flatnonzero(first[order[inside]] == second) if len(first) else np.empty(0, np.int64)
    return np.column_stack([order[inside[equal]], equal]) if len(equal) else np.empty((0, 2), np.int64)


def near_pairs(first: tuple[Array, Array], second: tuple[Array, Array]) -> Array:
    """Return pairs of positions [P, 2] of nearly identical images; both arguments are results of `fingerprints`."""
    pairs = [pairs for byte in range(8) for pairs in _candidates(first[0], second[0], byte)]
    if not pairs:
        return np.empty((0, 2), np.int64)
    found = np.unique(np.concatenate(pairs), axis=0)
    alike = [_correlation(first[1][part[:, 0]], second[1][part[:, 1]]) for part in np.array_split(found, len(found) // 50_000 + 1)]
    return found[np.concatenate(alike) >= MIN_CORRELATION]


def _candidates(first: Array, second: Array, byte: int) -> Iterator[Array]:
    """Yield pairs that agree in one byte and differ in few bits, in chunks that fit in memory."""
    keys, probes = (hashes.view(np.uint8).reshape(-1, 8)[:, byte] for hashes in (first, second))
    order = np.argsort(keys, kind="stable")
    starts = np.searchsorted(keys[order], np.arange(257))
    for value in range(256):
        left = order[starts[value] : starts[value + 1]]
        right = np.flatnonzero(probes == value)
        rows = max(1, _CHUNK // max(1, len(left)))
        for begin in range(0, len(right), rows):
            part = right[begin : begin + rows]
            distance = _hamming_distance(first[left][None], second[part][:, None])
            rows_right, rows_left = np.nonzero(distance <= MAX_BITS)
            if len(rows_right):
                yield np.column_stack([left[rows_left], part[rows_right]])


def _hamming_distance(first: Array, second: Array) -> Array:
    words = np.ascontiguousarray(first ^ second).view(np.uint16).reshape(*np.broadcast_shapes(first.shape, second.shape), 4)
    return np.asarray(_BIT_COUNTS[words].sum(-1, dtype=np.uint8))


def _correlation(first: Array, second: Array) -> Array:
    a, b = (rows.astype(np.float32) - rows.mean(1, dtype=np.float32, keepdims=True) for rows in (first, second))
    product = (a * b).sum(1)
    scale = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    flat = scale < 1e-3  # two images of one colour each
    same_grey = np.abs(first.mean(1) - second.mean(1)) < 2
    return np.asarray(np.where(flat, same_grey, product / np.maximum(scale, 1e-3)))
