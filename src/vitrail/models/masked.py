"""Masked patch prediction (App. B.1.2): half of the patch embeddings are spoilt, and the model says what had been there.

What is learnt without labels needs parts that no later use needs: a [mask] token, a prediction head, a decoder. They live in a
module around the ViT, so that the ViT itself stays what it always is and is saved as such.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.config import ViTConfig
from vitrail.models.cost import flops
from vitrail.models.initialise import lecun_normal_, small_normal_
from vitrail.models.vit import ViT

MASKED, REPLACED = 0.8, 0.1  # of the corrupted patches; the rest are kept as they are


class Pretraining(nn.Module, ABC):
    """A ViT with the parts it needs only while it learns without labels.

    `forward(images, noise)` gives predictions [image, place, outputs] and the places [image, place] they are for, counted along
    the rows of the grid. All chance lies in `noise` [image, patch, `draws`], uniform from 0 to below 1: the model itself is a
    plain function, and the same noise hides the same patches.
    """

    draws: int

    def __init__(self, encoder: ViT, hidden: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = hidden
        """Patches of each image that are predicted."""

    @property
    def config(self) -> ViTConfig:
        return self.encoder.config

    @property
    def patches(self) -> int:
        return self.config.grid[0] * self.config.grid[1]

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated parts, in which sharded training cuts a model up."""
        return list(self.encoder.blocks)

    def parts(self) -> dict[str, Tensor]:
        """What is not the encoder, by name."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("encoder.")}

    @abstractmethod
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Draw initial values for everything but the encoder."""

    @abstractmethod
    def flops(self) -> int:
        """Operations of one image's forward pass, counted as `models.flops` does."""

    def _finished(self, tokens: Tensor) -> Tensor:
        """Encoded tokens after the final norm, also where the model has it after pooling."""
        normed = self.config.final_norm == "before-pool"
        return tokens if normed else self.encoder.norm(tokens)


class MaskedPatches(Pretraining):
    """Corrupts `rate` of the patch embeddings of every image and predicts `outputs` numbers for each of these patches.

    The counts are exact: round(rate · patches) are corrupted, and of those round(80 %) become the learned [mask], round(10 %)
    another patch of the batch, never the one in its own place, and the rest stay (halves are rounded to even numbers).
    Positions are added afterwards.
    """

    draws = 2  # one decides who is corrupted and how, one whom a patch is replaced by

    def __init__(
        self, encoder: ViT, outputs: int, rate: float = 0.5, *, masked: float = MASKED, replaced: float = REPLACED
    ) -> None:
        super().__init__(encoder, count_of(rate, encoder.config))
        self.masked, self.replaced = shares_of(self.hidden, masked, replaced)
        self.mask_token = nn.Parameter(torch.empty(1, 1, encoder.config.width))
        self.head = nn.Linear(encoder.config.width, outputs)

    def reset(self, generator: torch.Generator | None = None) -> None:
        with torch.no_grad():
            nn.init.normal_(self.mask_token, std=0.02, generator=generator)
            (small_normal_ if self.config.init == "small" else lecun_normal_)(self.head.weight, generator)
            nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        order = noise[..., 0].argsort(dim=1)
        spoilt = self.corrupt(self.encoder.embed_patches(images), order, noise[..., 1])
        # Only what is asked for goes through the head: with 16 × 512 outputs it is as large as a block.
        return self.head(self.encode(spoilt, order)), order[:, : self.hidden]

    def corrupt(self, patches: Tensor, order: Tensor, noise: Tensor) -> Tensor:
        """The embeddings [image, patch, width] with some spoilt: in each image's `order` first the masked, then the replaced."""
        mask = self.mask_token.to(patches.dtype).expand(len(patches), self.masked, -1)
        changed = order[:, : self.masked + self.replaced]
        donors = self.donors(changed[:, self.masked :], noise)
        others = patches.flatten(0, 1).index_select(0, donors.flatten()).reshape(len(patches), self.replaced, patches.shape[2])
        return patches.scatter(1, changed[..., None].expand(-1, -1, patches.shape[2]), torch.cat([mask, others], dim=1))

    def encode(self, patches: Tensor, order: Tensor) -> Tensor:
        """The encoder's output of the patches that come first in `order` [image, patch], in that order."""
        x, prefix = self.encoder.assemble(patches), self.config.prefix
        if not self._any_order:
            return at(self._finished(self.encoder.encode(x))[:, prefix:], order[:, : self.hidden])
        # Attention knows no order once positions are added; so what is asked for goes first, and the last block leaves out
        # the rest.
        first, rest = order[:, : self.hidden] + prefix, order[:, self.hidden :] + prefix
        x = taken(x, torch.cat([first, prefix_places(order, prefix), rest], dim=1))
        return self._finished(self.encoder.encode(x, first=self.hidden))

    def donors(self, places: Tensor, noise: Tensor) -> Tensor:
        """For each place, evenly drawn among all other patches of the batch: their numbers, images one after the other."""
        images, count = noise.shape
        total = images * count
        own = torch.arange(images, device=places.device)[:, None] * count + places
        steps = (noise.gather(1, places) * (total - 1)).long().clamp(max=max(total - 2, 0))
        return (own + 1 + steps) % total

    @property
    def _any_order(self) -> bool:
        """Whether tokens may change places once they have their positions."""
        return self.config.attention == "full" and self.config.position_at == "input"

    def flops(self) -> int:
        head = 2 * self.hidden * self.head.in_features * self.head.out_features
        return flops(self.config) + head - (unread_flops(self.config, self.config.tokens, self.hidden) if self._any_order else 0)


def at(values: Tensor, places: Tensor) -> Tensor:
    """Of values [image, patch, …] those at places [image, place]."""
    index = places.reshape(*places.shape, *(1,) * (values.ndim - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)


def prefix_places(order: Tensor, prefix: int) -> Tensor:
    """The places of the prefix tokens, for each image of `order`."""
    return torch.arange(prefix, device=order.device).expand(len(order), -1)


def taken(tokens: Tensor, places: Tensor) -> Tensor:
    """Of tokens [image, token, width] those at places [image, place], each at most once."""
    return _Taken.apply(tokens, places)  # type: ignore[no-any-return]


class _Taken(torch.autograd.Function):
    """`at` for whole sequences: as no place comes twice, gradients are copied back in one pass, without additions."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor) -> Tensor:
        images, count, width = tokens.shape
        rows = (torch.arange(images, device=places.device)[:, None] * count + places).flatten()
        ctx.save_for_backward(rows)
        ctx.shape = tokens.shape
        return tokens.reshape(images * count, width).index_select(0, rows).reshape(images, -1, width)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        images, count, width = ctx.shape
        whole = len(rows) == images * count
        back = (slope.new_empty if whole else slope.new_zeros)(images * count, width)
        return back.index_copy_(0, rows, slope.reshape(-1, width)).reshape(ctx.shape), None


def unread_flops(config: ViTConfig, tokens: int, read: int) -> int:
    """Operations that the last block of so many tokens leaves out when only `read` of them are asked for."""
    own = 2 * config.width * (2 * config.width + 2 * config.mlp)  # query, output projection, MLP
    return (tokens - read) * (own + 4 * config.width * tokens)


def count_of(rate: float, config: ViTConfig) -> int:
    """How many patches of an image a rate means."""
    patches = config.grid[0] * config.grid[1]
    count = round(rate * patches)
    if not 0 < rate <= 1 or count < 1:
        raise VitrailError(
            f"A mask rate of {rate:g} hides {max(count, 0)} of the {patches} patches of {config.name} at "
            f"{config.image_size[0]}×{config.image_size[1]}; it is a share above 0, at most 1, that hides at least one."
        )
    return count


def shares_of(count: int, masked: float = MASKED, replaced: float = REPLACED) -> tuple[int, int]:
    """How many of the corrupted patches are masked, and how many replaced; the rest are kept."""
    first = round(masked * count)
    return first, min(round(replaced * count), count - first)
