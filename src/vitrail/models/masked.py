"""Masked patch prediction (App. B.1.2): half of the patch embeddings are corrupted, and the model predicts the original patches.

Pre-training without labels needs parts that nothing needs afterwards: a [mask] token, a prediction head, a decoder. They live in a
module around the ViT, so that the ViT itself stays as it is and is saved as such.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.config import ViTConfig
from vitrail.models.cost import flops, unread_flops
from vitrail.models.features import other_grid
from vitrail.models.fused.ordinary_call import is_ordinary_call
from vitrail.models.initialisation import lecun_normal_, small_normal_
from vitrail.models.vit import ViT

MASKED, REPLACED = 0.8, 0.1  # of the corrupted patches; the rest are left as they are


class Pretraining(nn.Module, ABC):
    """A ViT with the parts it needs only for pre-training without labels.

    `forward(images, noise)` gives predictions [image, masked patch, outputs] and the indices [image, masked patch] they are for,
    row by row over the grid. All randomness is in `noise` [image, patch, `draws`], uniform from 0 to below 1: the model itself is
    a deterministic function, and the same noise masks the same patches.
    """

    draws: int

    def __init__(self, encoder: ViT, num_masked: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.num_masked = num_masked
        """Patches that are predicted, per image."""

    @property
    def config(self) -> ViTConfig:
        return self.encoder.config

    @property
    def patches(self) -> int:
        return self.config.grid[0] * self.config.grid[1]

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated parts: the units of sharding."""
        return list(self.encoder.blocks)

    def parts(self) -> dict[str, Tensor]:
        """Return every tensor that is not the encoder's, by name."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("encoder.")}

    @abstractmethod
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Draw initial values for everything but the encoder."""

    @abstractmethod
    def flops(self) -> int:
        """Return the FLOPs of one image's forward pass, counted as `models.flops` does."""

    def _embed(self, images: Tensor) -> Tensor:
        """Return patch embeddings. Noise and targets are those of the model's own image size, also where it accepts others."""
        patches = self.encoder.embed_patches(images)
        if other_grid(self.config, images):
            (height, width), given = self.config.image_size, images.shape[2:]
            raise VitrailError(
                f"{self.config.name} is pre-trained on {height}×{width} images, these are {given[0]}×{given[1]}. Resize the images."
            )
        return patches

    def _normed(self, tokens: Tensor) -> Tensor:
        """Encoded tokens after the final norm, also where the model has it after pooling."""
        normed = self.config.final_norm == "before-pool"
        return tokens if normed else self.encoder.norm(tokens)


class MaskedPatches(Pretraining):
    """Corrupts `rate` of the patch embeddings of every image and predicts `outputs` numbers for each of these patches.

    The counts are exact: round(rate · patches) are corrupted, and of those round(80 %) become the learned [mask], round(10 %)
    another patch of the batch, never the same one, and the rest stay as they are (halves are rounded to even numbers).
    Positions are added afterwards.
    """

    draws = 2  # one decides which patches are corrupted and how, one which patch replaces another

    def __init__(
        self, encoder: ViT, outputs: int, rate: float = 0.5, *, masked: float = MASKED, replaced: float = REPLACED
    ) -> None:
        super().__init__(encoder, num_masked_of(rate, encoder.config))
        self.masked, self.replaced = corruption_counts(self.num_masked, masked, replaced)
        self.mask_token = nn.Parameter(torch.empty(1, 1, encoder.config.width))
        self.head = nn.Linear(encoder.config.width, outputs)

    def reset(self, generator: torch.Generator | None = None) -> None:
        with torch.no_grad():
            nn.init.normal_(self.mask_token, std=0.02, generator=generator)
            (small_normal_ if self.config.init == "small" else lecun_normal_)(self.head.weight, generator)
            nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        order = noise[..., 0].argsort(dim=1)
        corrupted = self.corrupt(self._embed(images), order, noise[..., 1])
        # Only masked patches go through the head: with 16 × 512 outputs it is as large as a block.
        return self.head(self.encode(corrupted, order)), order[:, : self.num_masked]

    def corrupt(self, patches: Tensor, order: Tensor, noise: Tensor) -> Tensor:
        """Corrupt embeddings [image, patch, width]: in each image's `order` first the masked patches, then the replaced ones."""
        mask = self.mask_token.to(patches.dtype).expand(len(patches), self.masked, -1)
        changed = order[:, : self.masked + self.replaced]
        donors = self.donors(changed[:, self.masked :], noise)
        others = patches.flatten(0, 1).index_select(0, donors.flatten()).reshape(len(patches), self.replaced, patches.shape[2])
        return patches.scatter(1, changed[..., None].expand(-1, -1, patches.shape[2]), torch.cat([mask, others], dim=1))

    def encode(self, patches: Tensor, order: Tensor) -> Tensor:
        """Encode, and return the patches that come first in `order` [image, patch], in that order."""
        x, prefix = self.encoder.add_prefix_and_positions(patches), self.config.prefix
        if not self._any_order:
            return at(self._normed(self.encoder.encode(x))[:, prefix:], order[:, : self.num_masked])
        # Attention does not depend on the order of tokens once positions are added. So the masked patches go first, and the last
        # block computes only these.
        masked, rest = order[:, : self.num_masked] + prefix, order[:, self.num_masked :] + prefix
        x = gather_tokens(x, torch.cat([masked, prefix_indices(order, prefix), rest], dim=1))
        return self._normed(self.encoder.encode(x, num_queries=self.num_masked))

    def donors(self, indices: Tensor, noise: Tensor) -> Tensor:
        """For each patch, another one drawn evenly from the batch: its index, images one after the other."""
        images, count = noise.shape
        total = images * count
        own = torch.arange(images, device=indices.device)[:, None] * count + indices
        steps = (noise.gather(1, indices) * (total - 1)).long().clamp(max=max(total - 2, 0))
        return (own + 1 + steps) % total

    @property
    def _any_order(self) -> bool:
        """Whether tokens may be reordered once they have their positions."""
        return self.config.attention == "full" and self.config.position_at == "input"

    def flops(self) -> int:
        head = 2 * self.num_masked * self.head.in_features * self.head.out_features
        saved = unread_flops(self.config, self.config.tokens, self.num_masked) if self._any_order else 0
        return flops(self.config) + head - saved


def at(values: Tensor, indices: Tensor) -> Tensor:
    """Gather values [image, patch, …] at indices [image, index]."""
    index = indices.reshape(*indices.shape, *(1,) * (values.ndim - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)


def prefix_indices(order: Tensor, prefix: int) -> Tensor:
    """Return the indices of the prefix tokens, for each image of `order`."""
    return torch.arange(prefix, device=order.device).expand(len(order), -1)


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Gather tokens [image, token, width] at indices [image, index], each at most once."""
    if not is_ordinary_call():
        return at(tokens, indices)
    return _GatherTokens.apply(tokens, indices)  # type: ignore[no-any-return]


class _GatherTokens(torch.autograd.Function):
    """`at` for whole sequences: as no index comes twice, gradients are copied back in one pass, without additions."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, indices: Tensor) -> Tensor:
        images, count, width = tokens.shape
        rows = (torch.arange(images, device=indices.device)[:, None] * count + indices).flatten()
        ctx.save_for_backward(rows)
        ctx.shape = tokens.shape
        return tokens.reshape(images * count, width).index_select(0, rows).reshape(images, -1, width)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        images, count, width = ctx.shape
        covers_all = len(rows) == images * count
        grad = (grad_out.new_empty if covers_all else grad_out.new_zeros)(images * count, width)
        return grad.index_copy_(0, rows, grad_out.reshape(-1, width)).reshape(ctx.shape), None


def num_masked_of(rate: float, config: ViTConfig) -> int:
    """Return the number of patches per image that a mask rate means."""
    patches = config.grid[0] * config.grid[1]
    count = round(rate * patches)
    if not 0 < rate <= 1 or count < 1:
        raise VitrailError(
            f"A mask rate of {rate:g} masks {max(count, 0)} of the {patches} patches of {config.name} at "
            f"{config.image_size[0]}×{config.image_size[1]}. Choose a rate above 0 and at most 1 that masks at least one patch."
        )
    return count


def corruption_counts(count: int, masked: float = MASKED, replaced: float = REPLACED) -> tuple[int, int]:
    """Return how many of the corrupted patches are masked, and how many replaced; the rest are left as they are."""
    first = round(masked * count)
    return first, min(round(replaced * count), count - first)
