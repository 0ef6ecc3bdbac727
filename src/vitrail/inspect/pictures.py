"""Turn arrays into pictures: mosaics of tiles, and images dimmed by an attention map."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vitrail.inspect.inputs import Array


def mosaic(tiles: Array, gap: int = 1) -> Array:
    """Arrange tiles [row, column, height, width, …] in one picture. Gaps are NaN, which matplotlib leaves blank."""
    rows, columns, height, width = tiles.shape[:4]
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, *tiles.shape[4:]), np.nan)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + gap), column * (width + gap)
            sheet[top : top + height, left : left + width] = tiles[row, column]
    return sheet


def filled_grid(tiles: Array, columns: int) -> Array:
    """Reshape [tile, …] to [row, column, …]; the last row is padded with NaN."""
    rows = -(-len(tiles) // columns)
    grid = np.full((rows * columns, *tiles.shape[1:]), np.nan)
    grid[: len(tiles)] = tiles
    return grid.reshape(rows, columns, *tiles.shape[1:])


def even_steps(count: int, limit: int) -> list[int]:
    """Choose at most `limit` evenly spaced indices below `count`, starting at 0."""
    step = -(-count // limit)
    return list(range(0, count, step))


def attention_mask(values: Array, size: tuple[int, int], blur: float) -> Array:
    """Resize a map [row, column] smoothly to `size` (height, width), from 0 to 1, as the authors draw it.

    The map is divided by its maximum, enlarged with Lanczos, blurred with a Gaussian of one patch, and rescaled to the full
    range, all in floating point. A constant map is not rescaled: it becomes all zeros if it is zero, else all ones.
    """
    top = float(values.max())
    if top <= 0 or float(values.min()) == top:
        return np.full(size, float(top > 0))
    small = Image.fromarray((values / top).astype(np.float32))
    large = np.asarray(small.resize((size[1], size[0]), Image.Resampling.LANCZOS), dtype=np.float64)
    mask = _blurred(large.clip(0, 1), blur)
    mask -= mask.min()
    top = float(mask.max())
    return np.asarray(mask / top) if top > 1e-6 else np.ones(size)  # the rest would be noise


def _blurred(values: Array, sigma: float) -> Array:
    """Convolve with a Gaussian along both axes; the border is repeated outside."""
    reach = max(1, round(4 * sigma))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        padding = [(reach, reach) if one == axis else (0, 0) for one in (0, 1)]
        values = np.apply_along_axis(np.convolve, axis, np.pad(values, padding, mode="edge"), weights, mode="valid")
    return values


def dimmed(picture: Array, mask: Array) -> Array:
    """Multiply the picture [height, width, 3] by the mask."""
    return picture * mask[..., None]
