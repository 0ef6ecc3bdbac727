"""BiT: the paper's ResNet baseline, pre-activation with GroupNorm and standardised convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import surgery
from vitrail.models.config import BiTConfig, Pair, ResNetConfig
from vitrail.models.features import Features, check_images, chosen_layers, in_precision_of
from vitrail.models.recompute import Keep, Recompute
from vitrail.models.resnet import StandardisedConv, build_stages, group_norm, max_pool


class PreActivationUnit(nn.Module):
    """Norm and ReLU before each of three convolutions; the shortcut's projection sees the first activation."""

    def __init__(self, config: ResNetConfig, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = group_norm(config, channels), StandardisedConv(config, channels, filters, 1)
        self.norm2, self.conv2 = group_norm(config, filters), StandardisedConv(config, filters, filters, 3, stride)
        self.norm3, self.conv3 = group_norm(config, filters), StandardisedConv(config, filters, 4 * filters, 1)
        projected = channels != 4 * filters or stride != 1
        self.projection = StandardisedConv(config, channels, 4 * filters, 1, stride) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        shortcut = x if self.projection is None else self.projection(active)
        x = self.conv1(active)
        x = self.conv2(F.relu(self.norm2(x)))
        return shortcut + self.conv3(F.relu(self.norm3(x)))  # type: ignore[no-any-return]


class BiT(nn.Module):
    """`model(images) → logits`. It takes any image size from its stride upwards."""

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        resnet = config.resnet
        self.root = StandardisedConv(resnet, config.channels, resnet.width, 7, 2)
        self.stages = build_stages(resnet, PreActivationUnit)
        self.norm = group_norm(resnet, resnet.out_channels)
        self.head = surgery.new_head(config)
        self.recompute = Recompute()

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits [batch, outputs] in float32; without a head, its input."""
        return self.head(self._map(images).mean(dim=(2, 3)))  # type: ignore[no-any-return]

    def features(self, images: Tensor, layers: Iterable[int] = ()) -> Features:
        """Return the final map as patches and tokens; there are no prefix tokens. `layers` also keeps maps after those stages."""
        numbers = list(layers)
        kept: dict[int, Tensor] = dict.fromkeys(chosen_layers(numbers, len(self.stages)) if numbers else (), images)
        patches = self._map(images, kept).permute(0, 2, 3, 1)
        tokens, pooled = patches.flatten(1, 2), patches.mean(dim=(1, 2))
        return Features(tokens, tokens[:, :0], patches, pooled, pooled, kept)

    def attention(
        self, images: Tensor, layers: Iterable[int] | None = None, *, pooling: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        raise VitrailError(f"{self.config.name} is a ResNet: it has no attention to look at. ViTs and hybrids have.")

    def resize(self, size: int | Pair, rule: str | None = None) -> BiT:
        """Record another input size; a ResNet has no positions to resample."""
        self.config = self.config.replace(image_size=size)
        return self

    def replace_head(self, outputs: int) -> BiT:
        """Put on a new zero-initialised head, as fine-tuning does; the old one is discarded."""
        return surgery.replace_head(self, outputs)

    def checkpoint_activations(self, blocks: int | None = None, keep: Keep = "nothing") -> int:
        """Recompute the first `blocks` units (None: all) in the backward pass; returns how many it covers."""
        return surgery.checkpoint_activations(self, sum(self.config.resnet.layers), blocks, keep)

    def _map(self, images: Tensor, kept: dict[int, Tensor] | None = None) -> Tensor:
        check_images(images, self.config)
        x, number = max_pool(self.root(in_precision_of(images, self.root.weight)), self.config.resnet), 0
        for index, stage in enumerate(self.stages):
            for unit in stage:  # type: ignore[attr-defined]
                x = self.recompute.run(number, unit, x, draws=False)
                number += 1
            if kept and index in kept:
                kept[index] = x.permute(0, 2, 3, 1)
        return F.relu(self.norm(x))
