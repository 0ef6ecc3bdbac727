"""Position embeddings: the kinds the paper compares (App. D.4), and how each is carried to another grid.

Every kind answers the same three questions: what is added to the tokens at the input, what before a layer, and what bias a
layer's attention gets. A leading axis of length 1 or L says whether layers share one table. Each takes one more argument for images
of another size (`ViTConfig.any_size`): their grid, to which the kind resamples what it has. `resize` does the same for good.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import Pair, PositionRule, ViTConfig
from vitrail.models.resample import resize_grid, sincos_on, sincos_table


class Positions(nn.Module):
    """No position information; the kinds below fill in what they have."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.rule = config.grid, config.position_resize
        self.at = config.position_at
        self.layers = config.blocks if config.position_at == "every-layer" else 1
        self.covered = config.prefix if config.position_prefix else 0
        self.uncovered = config.prefix - self.covered

    def at_input(self, x: Tensor, *other: Pair) -> Tensor:
        return self._add(x, 0, *other) if self.at == "input" else x

    def before_layer(self, x: Tensor, layer: int, *other: Pair) -> Tensor:
        return x if self.at == "input" else self._add(x, layer if self.at == "every-layer" else 0, *other)

    def bias(self, layer: int, *other: Pair) -> Tensor | None:
        return None

    def of_patches(self, layer: int = 0, *other: Pair) -> Tensor | None:
        """Return the vector each patch gets, [row, column, width]; None for kinds that add none."""
        table = self._table(layer, *other)
        return None if table is None else table[self.covered :].reshape(*(other[0] if other else self.grid), -1)

    def reset(self, std: float, generator: torch.Generator | None) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std, generator=generator)

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        self.grid, self.rule = grid, rule

    def _table(self, layer: int, *other: Pair) -> Tensor | None:
        """Return what is added, [covered prefix + patches, width]."""
        return None

    def _add(self, x: Tensor, layer: int, *other: Pair) -> Tensor:
        table = self._table(layer, *other)
        if table is None:
            return x
        if self.uncovered:  # prefix tokens without a position get zeros, so that one addition does
            table = F.pad(table, (0, 0, self.uncovered, 0))
        return x + table


class LearnedPositions(Positions):
    """One learned vector per position, prefix first, rows then columns: the paper's default."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(self.layers, self.covered + self.grid[0] * self.grid[1], config.width))

    def _table(self, layer: int, *other: Pair) -> Tensor:
        return self._resized(self.table[layer, None], other[0], self.rule)[0] if other else self.table[layer]

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        self.table = _like(self.table, self._resized(self.table.data, grid, rule))
        super().resize(grid, rule)

    def _resized(self, table: Tensor, grid: Pair, rule: PositionRule) -> Tensor:
        patches = table[:, self.covered :].unflatten(1, self.grid)
        return torch.cat([table[:, : self.covered], resize_grid(patches, grid, rule).flatten(1, 2)], dim=1)


class LearnedPositions2D(Positions):
    """A learned half-width vector per column (x) and one per row (y), side by side."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.rows = nn.Parameter(torch.empty(self.layers, self.grid[0], config.width // 2))
        self.columns = nn.Parameter(torch.empty(self.layers, self.grid[1], config.width // 2))
        self.prefix = nn.Parameter(torch.empty(self.layers, self.covered, config.width)) if self.covered else None

    def _table(self, layer: int, *other: Pair) -> Tensor:
        y, x = self.rows[layer], self.columns[layer]
        if other:
            y, x = (_resized_line(line[None], n, self.rule)[0] for line, n in zip((y, x), other[0], strict=True))
        patches = torch.cat([x[None].expand(len(y), -1, -1), y[:, None].expand(-1, len(x), -1)], dim=-1).flatten(0, 1)
        return patches if self.prefix is None else torch.cat([self.prefix[layer], patches])

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        self.rows = _like(self.rows, _resized_line(self.rows.data, grid[0], rule))
        self.columns = _like(self.columns, _resized_line(self.columns.data, grid[1], rule))
        super().resize(grid, rule)


class SinCosPositions(Positions):
    """Fixed sines and cosines of the coordinates; nothing to learn or to store."""

    table: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.width = config.width
        self.register_buffer("table", torch.empty(config.grid[0] * config.grid[1], config.width), persistent=False)

    def _table(self, layer: int, *other: Pair) -> Tensor:
        return sincos_on(other[0], self.width, self.table.device).to(self.table.dtype) if other else self.table

    def reset(self, std: float, generator: torch.Generator | None) -> None:
        self.fill()

    def fill(self) -> None:
        """Compute the table; needed once the memory exists, since it is in no checkpoint."""
        self.table = sincos_table(self.grid, self.width).to(self.table)

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        super().resize(grid, rule)
        self.fill()


class RelativePositions(Positions):
    """A learned bias per head for each offset between two patches, added to the attention scores.

    Pairs with a prefix token have no offset; they get three values of their own: from a prefix token to a patch, from a patch
    to a prefix token, and between prefix tokens.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.count = config.prefix
        self.offsets = nn.Parameter(torch.empty(self.layers, *_num_offsets(self.grid), config.heads))
        self.prefix = nn.Parameter(torch.empty(self.layers, 3, config.heads)) if self.count else None

    def bias(self, layer: int, *other: Pair) -> Tensor:
        layer = layer if self.at == "every-layer" else 0
        offsets, (rows, columns) = self.offsets[layer], other[0] if other else self.grid
        if other:
            offsets = resize_grid(offsets[None], _num_offsets(other[0]), self.rule)[0]
        y, x = (torch.arange(n, device=offsets.device) for n in (rows, columns))
        dy = (y[:, None] - y[None, :] + rows - 1)[:, None, :, None]
        dx = (x[:, None] - x[None, :] + columns - 1)[None, :, None, :]
        patches = offsets[dy, dx].permute(4, 0, 1, 2, 3).reshape(-1, rows * columns, rows * columns)
        if self.prefix is None:
            return patches
        to_patch, to_prefix, among = (value[:, None, None] for value in self.prefix[layer])
        below = torch.cat([to_prefix.expand(-1, rows * columns, self.count), patches], dim=2)
        above = torch.cat([among.expand(-1, self.count, self.count), to_patch.expand(-1, self.count, rows * columns)], dim=2)
        return torch.cat([above, below], dim=1)

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        self.offsets = _like(self.offsets, resize_grid(self.offsets.data, _num_offsets(grid), rule))
        super().resize(grid, rule)


KINDS: dict[str, type[Positions]] = {
    "none": Positions,
    "learned": LearnedPositions,
    "learned-2d": LearnedPositions2D,
    "sincos2d": SinCosPositions,
    "relative": RelativePositions,
}


def _like(old: nn.Parameter, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=old.requires_grad)


def _resized_line(vectors: Tensor, length: int, rule: PositionRule) -> Tensor:
    """Resample vectors [layer, position, channel] along one axis."""
    return resize_grid(vectors[:, :, None], (length, 1), rule)[:, :, 0]


def _num_offsets(grid: Pair) -> Pair:
    """How many offsets there are between two patches of a grid, along each axis."""
    return 2 * grid[0] - 1, 2 * grid[1] - 1
