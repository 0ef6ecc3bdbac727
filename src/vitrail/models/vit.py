"""The Vision Transformer and its hybrid: equations 1 to 4 of the paper."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import attention_maps, surgery
from vitrail.models.attention import AttentionPool, attention_for
from vitrail.models.config import Pair, PositionRule, ViTConfig
from vitrail.models.features import Features, check_images, chosen_layers, grid_of, other_grid
from vitrail.models.fused import dispatch, encoder, ordinary_call
from vitrail.models.layers import LayerScale, Mlp, PatchEmbedding, StochasticDepth
from vitrail.models.positions import KINDS
from vitrail.models.recompute import Keep, Recompute
from vitrail.models.resnet import HybridStem


class Block(nn.Module):
    """One pre-norm encoder layer: z' = MSA(LN(z)) + z, then MLP(LN(z')) + z' (equations 2 and 3)."""

    def __init__(self, config: ViTConfig, number: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = attention_for(config, number)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config.width, config.mlp, config.gelu, config.dropout)
        self.scale1, self.scale2 = (nn.Identity() if config.layer_scale is None else LayerScale(config.width) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)
        self.skip = StochasticDepth(config.stochastic_depth * number / max(config.blocks - 1, 1))

    def forward(self, x: Tensor, bias: Tensor | None = None, num_queries: int | None = None, *grid: Pair) -> Tensor:
        """With `num_queries`, only so many of the first tokens come out, though they still attend to all."""
        attended = self.attention(self.norm1(x), bias, num_queries, *grid)
        return self._add_branches(x if num_queries is None else x[:, :num_queries], attended)

    def forward_pending(self, pending: encoder.PendingResidual, options: encoder.BlockOptions) -> encoder.PendingResidual:
        """`forward` in fused kernels: finishes the last addition of the block before, and leaves its own to the block after."""
        return encoder.run_block(self, pending, options)

    def with_attention(self, x: Tensor, bias: Tensor | None = None, *grid: Pair) -> tuple[Tensor, Tensor]:
        """Return the block's output, and its attention [batch, head, query, key]."""
        attended, weights = self.attention.with_weights(self.norm1(x), bias, *grid)
        return self._add_branches(x, attended), weights

    def _add_branches(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.skip(self.scale1(self.dropout(attended)))
        return x + self.skip(self.scale2(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """`model(images) → logits`, with everything on the way open to `features()` and `attention()`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.resnet = HybridStem(config.resnet, config.channels) if config.resnet else None
        self.patches = PatchEmbedding(config.patch_channels, width, config.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if config.class_token else None
        self.distill_token = nn.Parameter(torch.empty(1, 1, width)) if config.distill_token else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, width)) if config.registers else None
        self.positions = KINDS[config.position](config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, number) for number in range(config.blocks))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.pool = AttentionPool(config) if config.pooling == "map" else None
        self.pre_logits = nn.Linear(width, config.pre_logits) if config.pre_logits else None
        self.head = surgery.new_head(config)
        self.distill_head = surgery.new_head(config) if config.distill_token else None
        self.recompute = Recompute()
        # auto: fused kernels wherever they compute the same. plain: never. fp8: fused, and training matmuls in fp8.
        self.kernels: dispatch.Kernels = "auto"

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits [batch, outputs] in float32; a distilled model averages its two heads; without a head, its input."""
        return self.logits(self._encode_images(images, num_queries=self._num_read))

    def distilled_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the class token and of the distillation token, each from its own head."""
        if self.distill_head is None:
            raise VitrailError(f"{self.config.name} has no distillation token; build it with distill_token=True.")
        tokens = self._encode_images(images, num_queries=self._num_read)
        return self.head(self._pool(tokens)), self.distill_head(self._pool(tokens, token=1))

    def features(self, images: Tensor, layers: Iterable[int] = ()) -> Features:
        """Compute everything by name in one pass; `layers` also keeps the tokens after those blocks."""
        kept = dict.fromkeys(chosen_layers(wanted, len(self.blocks)) if (wanted := list(layers)) else (), images)
        tokens, prefix = self._encode_images(images, kept), self.config.prefix
        pooled, patches = self._pool(tokens), tokens[:, prefix:].unflatten(1, grid_of(self.config, images))
        return Features(tokens, tokens[:, :prefix], patches, pooled, self._represent(pooled), kept)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Compute the patch embeddings xE [batch, patch, width], before positions."""
        check_images(images, self.config)
        images = dispatch.patchify(self, images)
        return self.patches(images if self.resnet is None else self.resnet(images))  # type: ignore[no-any-return]

    def add_prefix_and_positions(self, patches: Tensor, *other: Pair) -> Tensor:
        """z₀ of equation 1: prefix tokens, then patch embeddings, with positions; `other`: their grid if not the model's own."""
        prefix = [token for token in (self.class_token, self.distill_token, self.registers) if token is not None]
        if dispatch.fuses_positions(self, patches):
            x = dispatch.add_prefix_and_positions(self, patches, prefix, *other)
        else:
            expanded = [token.expand(patches.shape[0], -1, -1).to(patches.dtype) for token in prefix]
            x = self.positions.at_input(torch.cat([*expanded, patches], dim=1) if expanded else patches, *other)
        return self.dropout(x)  # type: ignore[no-any-return]

    def encode(self, x: Tensor, kept: dict[int, Tensor] | None = None, num_queries: int | None = None, *other: Pair) -> Tensor:
        """Run all blocks, then the final norm if it comes before pooling. `kept` gets the tokens after the blocks it names.

        With `num_queries` the last block computes only so many of the first tokens. `other` as above.
        """
        stream = dispatch.ResidualStream(x, self.kernels, self.recompute, *other, fp8=self.kernels == "fp8" and self.training)
        for number, block in enumerate(self.blocks):
            stream.run(number, block, self.positions, num_queries if number == len(self.blocks) - 1 else None)
            if kept and number in kept:
                kept[number] = stream.tokens
        return stream.normed(self.norm) if self.config.final_norm == "before-pool" else stream.tokens

    def logits(self, tokens: Tensor) -> Tensor:
        """Apply the head, or both heads, to encoded tokens (equation 4)."""
        logits: Tensor = self.head(self._represent(self._pool(tokens)))
        return logits if self.distill_head is None else (logits + self.distill_head(self._pool(tokens, token=1))) / 2

    def attention(self, images: Tensor, layers: Iterable[int] | None = None, *, pooling: bool = False) -> attention_maps.Maps:
        """Yield each layer's number and its softmax(qkᵀ/√d) [batch, head, query, key]: see `attention_maps.attention`."""
        return attention_maps.attention(self, images, layers, pooling=pooling)

    def attention_gradients(self, images: Tensor, outputs: Tensor) -> attention_maps.MapsWithGradients:
        """From the last layer to the first, its attention and the gradient of an output by it: see `attention_maps`."""
        return attention_maps.attention_gradients(self, images, outputs)

    def resize(self, size: int | Pair, rule: PositionRule | None = None) -> ViT:
        """Take images of another size (height, width) from now on: see `surgery.resize`."""
        return surgery.resize(self, size, rule)

    def replace_head(self, outputs: int) -> ViT:
        """Put on a new zero-initialised head, as fine-tuning does (§3.2); the old one is discarded, pre-logits are kept."""
        return surgery.replace_head(self, outputs)

    def checkpoint_activations(self, blocks: int | None = None, keep: Keep = "nothing") -> int:
        """Recompute the first `blocks` blocks (None: all) in the backward pass; returns how many it covers."""
        return surgery.checkpoint_activations(self, len(self.blocks), blocks, keep)

    def _encode_images(self, images: Tensor, kept: dict[int, Tensor] | None = None, num_queries: int | None = None) -> Tensor:
        patches, other = self.embed_patches(images), other_grid(self.config, images)
        return self.encode(self.add_prefix_and_positions(patches, *other), kept, num_queries, *other)

    @property
    def _num_read(self) -> int | None:
        """How many tokens, from the first, the logits are read from; None: all."""
        return 1 + self.config.distill_token if self.config.pooling == "class" else None

    def _pool(self, tokens: Tensor, token: int = 0) -> Tensor:
        if self.pool is not None:
            x: Tensor = self.pool(tokens)
        elif self.config.pooling == "mean":
            x = tokens[:, self.config.prefix :].mean(dim=1)
        else:
            x = tokens[:, token]
        return self.norm(x) if self.config.final_norm == "after-pool" else x

    def _represent(self, pooled: Tensor) -> Tensor:
        return pooled if self.pre_logits is None else torch.tanh(self.pre_logits(pooled))


ordinary_call.imported_functions()  # now, so that a method patched before the first forward pass is noticed, too
