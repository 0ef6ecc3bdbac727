"""Position embeddings: the kinds the paper compares (App. D.4), and how each is carried to another grid.

Every kind answers the same three questions: what is added to the tokens at the input, what before a layer, and what bias a
layer's attention gets. A leading axis of length 1 or L says whether layers share one table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.config import Pair, PositionRule, ViTConfig

# How each code base resamples its table: torch's mode, align_corners, antialias. The reference calls scipy's zoom of order 1,
# which is bilinear with aligned corners.
RULES: dict[PositionRule, tuple[str, bool, bool]] = {
    "reference": ("bilinear", True, False),
    "timm": ("bicubic", False, True),
    "hf": ("bicubic", False, False),
    "torchvision": ("bicubic", True, False),
}


def resize_grid(table: Tensor, size: Pair, rule: PositionRule = "reference") -> Tensor:
    """Resample a table [layer, row, column, channel] to another number of rows and columns by a named rule.

    Done once, on the CPU and in float64, so that the result depends neither on the device nor on rounded coordinates.
    """
    if rule not in RULES:
        raise VitrailError(f"There is no position rule {rule!r}; known are {', '.join(RULES)}.")
    if min(size) < 1:
        raise VitrailError(f"A grid of {size[0]}×{size[1]} has no positions; both sides must be at least 1.")
    if tuple(table.shape[1:3]) == tuple(size):
        return table.clone()
    mode, align, antialias = RULES[rule]
    values = table.detach().to("cpu", torch.float64).permute(0, 3, 1, 2)
    values = F.interpolate(values, size=size, mode=mode, align_corners=align, antialias=antialias)
    return values.permute(0, 2, 3, 1).to(table.device, table.dtype).contiguous()


def sincos_table(grid: Pair, width: int) -> Tensor:
    """big_vision's fixed table [position, width]: sine and cosine of x, then of y, at frequencies from 1 down to 1/10000."""
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    frequencies = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4 - 1))
    angles_x, angles_y = (axis.flatten()[:, None] * frequencies[None, :] for axis in (x, y))
    return torch.cat([angles_x.sin(), angles_x.cos(), angles_y.sin(), angles_y.cos()], dim=1).float()


class Positions(nn.Module):
    """No position information; the kinds below fill in what they have."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.at = config.position_at
        self.layers = config.blocks if config.position_at == "every-layer" else 1
        self.covered = config.prefix if config.position_prefix else 0
        self.uncovered = config.prefix - self.covered

    def at_input(self, x: Tensor) -> Tensor:
        return self._add(x, 0) if self.at == "input" else x

    def before_layer(self, x: Tensor, layer: int) -> Tensor:
        return x if self.at == "input" else self._add(x, layer if self.at == "every-layer" else 0)

    def bias(self, layer: int) -> Tensor | None:
        return None

    def of_patches(self, layer: int = 0) -> Tensor | None:
        """Return the vector each patch gets, [row, column, width]; None for kinds that add none."""
        table = self._table(layer)
        return None if table is None else table[self.covered :].reshape(*self.grid, -1)

    def reset(self, std: float, generator: torch.Generator | None) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std, generator=generator)

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        self.grid = grid

    def _table(self, layer: int) -> Tensor | None:
        """Return what is added, [covered prefix + patches, width]."""
        return None

    def _add(self, x: Tensor, layer: int) -> Tensor:
        table = self._table(layer)
        if table is None:
            return x
        if self.uncovered:  # prefix tokens without a position get zeros, so that one addition does
            table = F.pad(table, (0, 0, self.uncovered, 0))
        return x + table


class LearnedPositions(Positions):
    """One learned vector a position, prefix first, rows then columns: the paper's default."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(self.layers, self.covered + self.grid[0] * self.grid[1], config.width))

    def _table(self, layer: int) -> Tensor:
        return self.table[layer]

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        prefix, patches = self.table.data[:, : self.covered], self.table.data[:, self.covered :]
        patches = resize_grid(patches.reshape(self.layers, *self.grid, -1), grid, rule).flatten(1, 2)
        self.table = _like(self.table, torch.cat([prefix, patches], dim=1))
        super().resize(grid, rule)


class LearnedPositions2D(Positions):
    """A learned half-width vector a column (x) and one a row (y), side by side."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.rows = nn.Parameter(torch.empty(self.layers, self.grid[0], config.width // 2))
        self.columns = nn.Parameter(torch.empty(self.layers, self.grid[1], config.width // 2))
        self.prefix = nn.Parameter(torch.empty(self.layers, self.covered, config.width)) if self.covered else None

    def _table(self, layer: int) -> Tensor:
        rows, columns = self.grid
        x = self.columns[layer][None].expand(rows, -1, -1)
        y = self.rows[layer][:, None].expand(-1, columns, -1)
        patches = torch.cat([x, y], dim=-1).flatten(0, 1)
        return patches if self.prefix is None else torch.cat([self.prefix[layer], patches])

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        self.rows = _like(self.rows, resize_grid(self.rows.data[:, :, None], (grid[0], 1), rule)[:, :, 0])
        self.columns = _like(self.columns, resize_grid(self.columns.data[:, None], (1, grid[1]), rule)[:, 0])
        super().resize(grid, rule)


class SinCosPositions(Positions):
    """Fixed sines and cosines of the coordinates; nothing to learn or to store."""

    table: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.width = config.width
        self.register_buffer("table", torch.empty(config.grid[0] * config.grid[1], config.width), persistent=False)

    def _table(self, layer: int) -> Tensor:
        return self.table

    def reset(self, std: float, generator: torch.Generator | None) -> None:
        self.fill()

    def fill(self) -> None:
        """Compute the table; needed once the memory exists, since it is in no checkpoint."""
        self.table = sincos_table(self.grid, self.width).to(self.table)

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        super().resize(grid, rule)
        self.fill()


class RelativePositions(Positions):
    """A learned bias a head for each offset between two patches, added to the attention scores.

    Pairs with a prefix token have no offset; they get three values of their own: from a prefix token to a patch, from a patch
    to a prefix token, and between prefix tokens.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.count = config.prefix
        rows, columns = self.grid
        self.offsets = nn.Parameter(torch.empty(self.layers, 2 * rows - 1, 2 * columns - 1, config.heads))
        self.prefix = nn.Parameter(torch.empty(self.layers, 3, config.heads)) if self.count else None

    def bias(self, layer: int) -> Tensor:
        layer = layer if self.at == "every-layer" else 0
        rows, columns = self.grid
        y, x = (torch.arange(n, device=self.offsets.device) for n in self.grid)
        dy = (y[:, None] - y[None, :] + rows - 1)[:, None, :, None]
        dx = (x[:, None] - x[None, :] + columns - 1)[None, :, None, :]
        patches = self.offsets[layer][dy, dx].permute(4, 0, 1, 2, 3).reshape(-1, rows * columns, rows * columns)
        if self.prefix is None:
            return patches
        to_patch, to_prefix, among = (value[:, None, None] for value in self.prefix[layer])
        below = torch.cat([to_prefix.expand(-1, rows * columns, self.count), patches], dim=2)
        above = torch.cat([among.expand(-1, self.count, self.count), to_patch.expand(-1, self.count, rows * columns)], dim=2)
        return torch.cat([above, below], dim=1)

    def resize(self, grid: Pair, rule: PositionRule) -> None:
        size = (2 * grid[0] - 1, 2 * grid[1] - 1)
        self.offsets = _like(self.offsets, resize_grid(self.offsets.data, size, rule))
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
