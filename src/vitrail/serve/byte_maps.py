"""Maps as bytes: attention with one scale per query, cosine similarities with a fixed one.

Attention in float32 is 192 MB for one image of 384 pixels and ViT-B/16; a byte per weight is a quarter of that, and one layer or
one query of it is sent at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.inspect.inputs import Array

MAX_REPLY = 2 << 20
"""Most bytes of a map that are sent at once. A larger layer is sent query by query."""


@dataclass(frozen=True)
class ByteMaps:
    """Non-negative weights [..., key] as `values` · `scales` / 255; a scale is the largest weight of its row."""

    values: Array
    scales: Array

    @classmethod
    def of(cls, weights: Array) -> ByteMaps:
        scales = weights.max(axis=-1).astype(np.float32)
        values = np.rint(weights * (255 / np.maximum(scales, 1e-30))[..., None])
        return cls(values.clip(0, 255).astype(np.uint8), scales)

    @property
    def max_error(self) -> float:
        """The most by which a weight differs: half a step of the largest scale."""
        return float(self.scales.max()) / 510

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> ByteMaps:
        return ByteMaps(self.values[index], self.scales[index])

    def weights(self) -> Array:
        found: Array = self.values * (self.scales[..., None] / np.float32(255))
        return found

    def encoded(self) -> bytes:
        """All scales as little-endian float32, then all values."""
        return self.scales.astype("<f4").tobytes() + self.values.tobytes()


def signed_to_bytes(values: Array) -> Array:
    """Encode values from −1 to 1 as 0 to 255; the error is at most 1/255."""
    encoded: Array = np.rint((np.clip(values, -1, 1) + 1) * 127.5).astype(np.uint8)
    return encoded
