"""Models whose weights give a known attention: uniform, or each token attends to one chosen token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import vitrail
from vitrail.models import ViT

STRIDE = (8, 4)


def tiny(grid: tuple[int, int], *, heads: int = 2, depth: int = 3, width: int | None = None, **changes: Any) -> ViT:
    """A small ViT with patches that are not square."""
    size = (grid[0] * STRIDE[0], grid[1] * STRIDE[1])
    fields = {"patch": STRIDE, "width": width or 12 * heads, "depth": depth, "heads": heads, "mlp": 16, "outputs": 5, **changes}
    model = vitrail.create_model("Ti/16", image_size=size, seed=0, **fields)
    assert isinstance(model, ViT)
    return model


def uniform(grid: tuple[int, int], **changes: Any) -> ViT:
    """Queries and keys are zero, so attention is uniform."""
    model = trained(tiny(grid, **changes))
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.zeros_(block.attention.qkv.bias)
    return model


def one_hot(grid: tuple[int, int], targets: Sequence[Callable[[int], int]], *, prefix: int, **changes: Any) -> ViT:
    """In every layer, head h of token t attends only to token targets[h](t).

    Position embeddings are one-hot and all other parts add zero, so queries and keys can be chosen freely.
    """
    tokens, heads = prefix + grid[0] * grid[1], len(targets)
    size = 2 * tokens  # twice the size needed: LayerNorm maps one-hot vectors that span the whole space to vectors that sum to zero
    model = trained(tiny(grid, heads=heads, width=heads * size, **changes))
    assert model.config.tokens == tokens
    with torch.no_grad():
        for parameter in (model.patches.weight, model.class_token, model.registers, model.distill_token):
            if parameter is not None:
                parameter.zero_()
        model.positions.table.copy_(torch.eye(tokens, heads * size)[None])
        for block in model.blocks:
            for layer in (block.attention.out, block.mlp.down):
                layer.weight.zero_()
                layer.bias.zero_()
            block.norm1.bias.zero_()
            block.attention.qkv.bias.zero_()
            q, k, _ = block.attention.qkv.weight.zero_().chunk(3)
            for head, target in enumerate(targets):
                for token in range(tokens):
                    q[head * size + target(token), token] = 1e3
                    k[head * size + token, token] = 1.0
    return model


def trained(model: ViT) -> ViT:
    """Make the weights look trained; the bias of the final norm does not affect attention."""
    torch.nn.init.normal_(model.norm.bias)
    torch.nn.init.normal_(model.head.weight)
    return model


def images(model: ViT, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, model.config.channels, *model.config.image_size, generator=generator)


def grid_mean_distance(grid: tuple[int, int], stride: tuple[int, int] = STRIDE) -> float:
    """The mean distance over all pairs of patches, including a patch with itself."""
    centres = [(r * stride[0], c * stride[1]) for r in range(grid[0]) for c in range(grid[1])]
    return float(np.mean([np.hypot(a[0] - b[0], a[1] - b[1]) for a in centres for b in centres]))


def shifted(grid: tuple[int, int], rows: int, columns: int, prefix: int) -> Callable[[int], int]:
    """Each patch attends to the patch `rows` and `columns` away, in the direction that exists; prefix tokens to themselves."""

    def target(token: int) -> int:
        if token < prefix:
            return token
        row, column = divmod(token - prefix, grid[1])
        row += rows if row + rows < grid[0] else -rows
        column += columns if column + columns < grid[1] else -columns
        return prefix + row * grid[1] + column

    return target
