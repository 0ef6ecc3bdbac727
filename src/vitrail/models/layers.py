"""The small parts of an encoder block."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import Pair


class PatchEmbedding(nn.Module):
    """The linear map E of equation 1: each patch, flattened, to the model's width.

    The weight has a convolution's shape, since that is how it is published and drawn, but is applied as one matrix product.
    """

    def __init__(self, channels: int, width: int, patch: Pair) -> None:
        super().__init__()
        self.patch = patch
        self.weight = nn.Parameter(torch.empty(width, channels, *patch))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, images: Tensor) -> Tensor:
        """Images, or patches [image, patch, channel · row · column] that have been cut already."""
        patches = cut(images, self.patch) if images.dim() == 4 else images
        return F.linear(patches, self.weight.flatten(1), self.bias)


def cut(images: Tensor, patch: Pair) -> Tensor:
    """Images [image, channel, row, column] as patches, row by row: [image, patch, channel · row · column]."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch[0], width // patch[1]
    patches = images.reshape(batch, channels, rows, patch[0], columns, patch[1])
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, gelu: Literal["tanh", "erf"], dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.approximate = "tanh" if gelu == "tanh" else "none"
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.gelu(self.up(x), approximate=self.approximate))
        return self.dropout(self.down(x))  # type: ignore[no-any-return]


class LayerScale(nn.Module):
    """A learned factor a channel on a residual branch, small at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class StochasticDepth(nn.Module):
    """Drops a residual branch for whole samples while training, and scales the kept ones so that the mean stays."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        mask = x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * (mask / keep)
