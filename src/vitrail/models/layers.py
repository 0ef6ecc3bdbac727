"""The small parts of an encoder block."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import Pair


class PatchEmbedding(nn.Module):
    """The linear map E of equation 1: each patch, flattened, to the model's width.

    The weight has a convolution's shape, since that is how it is published and drawn, but is applied as one matmul.
    """

    def __init__(self, channels: int, width: int, patch: Pair) -> None:
        super().__init__()
        self.patch = patch
        self.weight = nn.Parameter(torch.empty(width, channels, *patch))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, images: Tensor) -> Tensor:
        """Take images, or patches [image, patch, channel · row · column] as `patchify` gives them."""
        patches = patchify(images, self.patch) if images.dim() == 4 else images
        return F.linear(patches, self.weight.flatten(1), self.bias)


def patchify(images: Tensor, patch: Pair) -> Tensor:
    """Cut images [image, channel, row, column] into patches, row by row: [image, patch, channel · row · column]."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch[0], width // patch[1]
    patches = images.reshape(batch, channels, rows, patch[0], columns, patch[1])
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch[0] * patch[1])


class Mlp(nn.Module):
    """The MLP of a block (equation 3): to the hidden width and back, with GELU between."""

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
    """A learned factor per channel on a residual branch, small at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32 whatever the precision around it: the head.

    Logits in bfloat16 have 8 bits of mantissa: 400 sigmoid logits around −10 would share 16 values.
    """

    def forward(self, x: Tensor) -> Tensor:
        # The meta device has no autocast, and torch refuses to switch it off there.
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            if x.dtype not in (torch.bfloat16, torch.float16) and self.weight.dtype == x.dtype:
                return super().forward(x)
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


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
        return x * (mask / keep) if keep else x * mask
