"""The Vision Transformer and its hybrid: equations 1 to 4 of the paper."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.attention import AttentionPool, AxialAttention, attention_for
from vitrail.models.config import Pair, PositionRule, ViTConfig
from vitrail.models.features import Features, check_images, chosen_layers, evaluating
from vitrail.models.fused import encoder as fused
from vitrail.models.layers import LayerScale, Mlp, PatchEmbedding, StochasticDepth
from vitrail.models.positions import KINDS
from vitrail.models.recomputing import Keeps, Recomputing
from vitrail.models.resnet import HybridStem

log = logging.getLogger("vitrail")


class Block(nn.Module):
    """One pre-norm encoder layer: z' = MSA(LN(z)) + z, then MLP(LN(z')) + z' (equations 2 and 3)."""

    def __init__(self, config: ViTConfig, number: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = attention_for(config, number)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config.width, config.mlp, config.gelu, config.dropout)
        scaled = config.layer_scale is not None
        self.scale1 = LayerScale(config.width) if scaled else nn.Identity()
        self.scale2 = LayerScale(config.width) if scaled else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.skip = StochasticDepth(config.stochastic_depth * number / max(config.blocks - 1, 1))

    def forward(self, x: Tensor, bias: Tensor | None = None, first: int | None = None) -> Tensor:
        """With `first` only the first tokens come out, though they still look at all."""
        attended = self.attention(self.norm1(x), bias, first)
        return self._after_attention(x if first is None else x[:, :first], attended)

    def with_attention(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block's output, and its attention [batch, head, query, key]."""
        attended, weights = self.attention.with_weights(self.norm1(x), bias)
        return self._after_attention(x, attended), weights

    def _after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.skip(self.scale1(self.dropout(attended)))
        return x + self.skip(self.scale2(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """`model(images) → logits`, with everything on the way open to `features()` and `attention()`.

    Build it with `vitrail.create_model`, which also initialises it as the reference does.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
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
        self.head = self._new_head(config.outputs)
        self.distill_head = self._new_head(config.outputs) if config.distill_token else None
        self.recomputing = Recomputing()
        # plain: never the fused ones, which compute the same on a GPU. fp8: fused, and training with eight-bit products.
        self.kernels: Literal["auto", "plain", "fp8"] = "auto"

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, outputs]; for a distilled model the mean of its two heads; without a head what it would see."""
        return self._logits(self._tokens(images, first=self._read))

    def distilled_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the class token and of the distillation token, each from its own head."""
        if self.distill_head is None:
            raise VitrailError(f"{self.config.name} has no distillation token; build it with distill_token=True.")
        return self._both_logits(self._tokens(images, first=self._read), self.distill_head)

    def features(self, images: Tensor, layers: Iterable[int] = ()) -> Features:
        """Everything by name from one pass; `layers` also keeps the tokens after those blocks."""
        asked = list(layers)
        kept: dict[int, Tensor] = dict.fromkeys(chosen_layers(asked, len(self.blocks)) if asked else (), images)
        tokens, count = self._tokens(images, kept), self.config.prefix
        pooled = self._pooled(tokens)
        patches = tokens[:, count:].reshape(-1, *self.config.grid, self.config.width)
        return Features(tokens, tokens[:, :count], patches, pooled, self._represent(pooled), kept)

    def attention(
        self, images: Tensor, layers: Iterable[int] | None = None, *, pooling: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        """Each layer's number and its softmax(qkᵀ/√d) [batch, head, query, key], one layer at a time.

        Computed from the block's own q and k, in eval mode and without gradients, whatever kernel `forward` uses. Layers that
        were not asked for run on that kernel, and nothing runs past the last one asked for. With `pooling` comes one more at
        the end, numbered as if it were the next layer: how the pooled output weighs the last tokens, [batch, head, 1, key].
        """
        check_images(images, name=self.config.name, channels=self.config.channels, size=self.config.image_size)
        return self._attention(images, chosen_layers(layers, len(self.blocks)), pooling)

    @torch.no_grad()
    def _attention(self, images: Tensor, layers: tuple[int, ...], pooling: bool) -> Iterator[tuple[int, Tensor]]:
        with evaluating(self):
            x = self.assemble(self.embed_patches(images))
        for number in range(len(self.blocks) if pooling else layers[-1] + 1):
            block = self.blocks[number]
            x, bias = self.positions.before_layer(x, number), self.positions.bias(number)
            with evaluating(block):  # only while computing: between layers the caller finds the model as it was
                if number not in layers:
                    x = block(x, bias)
                    continue
                x, weights = block.with_attention(x, bias)  # type: ignore[operator]
            yield number, weights
        if pooling:
            yield len(self.blocks), self._pooling_weights(x)

    def _pooling_weights(self, x: Tensor) -> Tensor:
        """How the pooled output weighs the last block's tokens [batch, token, width]: [batch, head, 1, token]."""
        if self.pool is not None:
            return self.pool.weights(self._finished(x))
        weights = torch.zeros(x.shape[0], 1, 1, x.shape[1], device=x.device)
        heads = 2 if self.distill_head is not None else 1  # of the classifier: their logits are averaged
        chosen = slice(self.config.prefix, None) if self.config.pooling == "mean" else slice(heads)
        weights[..., chosen] = 1.0
        return weights / weights.sum(dim=-1, keepdim=True)

    def attention_gradients(self, images: Tensor, outputs: Tensor) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """From the last layer to the first: its number, its attention, and by how much each entry of it raises an output.

        `outputs` names one output for each image. First comes the pooling, as `attention` gives it, without gradients. The
        forward pass keeps only what enters each block; a block is run again for its gradients, so that a single layer's
        attention is alive at a time. Parameters get no gradients.
        """
        check_images(images, name=self.config.name, channels=self.config.channels, size=self.config.image_size)
        if not self.config.outputs:
            raise VitrailError(f"{self.config.name} has no head, so it has no output to take gradients of.")
        if outputs.shape != images.shape[:1] or not 0 <= int(outputs.min()) <= int(outputs.max()) < self.config.outputs:
            raise VitrailError(f"`outputs` takes one number from 0 to {self.config.outputs - 1} for each of {len(images)} images.")
        return self._attention_gradients(images, outputs)

    def _attention_gradients(self, images: Tensor, outputs: Tensor) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        entering: list[Tensor] = []
        with evaluating(self), torch.no_grad():
            x = self.assemble(self.embed_patches(images))
            for number, block in enumerate(self.blocks):
                entering.append(self.positions.before_layer(x, number))
                x = block(entering[-1], self.positions.bias(number))
            pooling = self._pooling_weights(x)
        yield len(self.blocks), pooling, None
        with evaluating(self), torch.enable_grad():
            x.requires_grad_()
            (slope,) = torch.autograd.grad(self._logits(self._finished(x)).gather(1, outputs[:, None]).sum(), x)
        for number in reversed(range(len(self.blocks))):
            block = self.blocks[number]
            with evaluating(block), torch.enable_grad():
                x, bias = entering.pop().requires_grad_(), self.positions.bias(number)
                x_after, weights = block.with_attention(x, bias)  # type: ignore[operator]
                by_weights, slope = torch.autograd.grad(x_after, (weights, x), slope)
            yield number, weights.detach(), by_weights

    def resize(self, size: int | Pair, rule: PositionRule | None = None) -> ViT:
        """Take images of another size (height, width) from now on; positions are resampled by the rule, or the model's own."""
        old, rule = self.config.grid, rule or self.config.position_resize
        self.config = self.config.replace(image_size=size, position_resize=rule)
        grid = self.config.grid
        if grid != old:
            self.positions.resize(grid, rule)
            log.info("positions %d×%d → %d×%d (%s, rule %r)", *old, *grid, self.config.position, rule)
        for block in self.blocks:
            if isinstance(block.attention, AxialAttention):
                block.attention.grid = grid
        return self

    def replace_head(self, outputs: int) -> ViT:
        """Put a new head of zeros on, as fine-tuning does (§3.2); an old one is discarded, pre-logits are kept."""
        self.config = self.config.replace(outputs=outputs)
        for name in ("head", "distill_head"):
            if getattr(self, name) is not None:
                head = self._new_head(outputs).to(self.norm.weight)
                for parameter in head.parameters():
                    nn.init.zeros_(parameter)
                setattr(self, name, head)
        return self

    def checkpoint_activations(self, blocks: int | None = None, keeps: Keeps = "nothing") -> int:
        """Recompute the first `blocks` blocks (None: all) in the backward pass to save memory; returns how many it covers.

        They keep nothing but their input or, with "products", also what is dear to compute again.
        """
        total = len(self.blocks)
        self.recomputing = Recomputing(total if blocks is None else min(max(blocks, 0), total), keeps)
        log.info("activation checkpointing: %d/%d blocks", self.recomputing.blocks, total)
        return self.recomputing.blocks

    def embed_patches(self, images: Tensor) -> Tensor:
        """The patches' embeddings [batch, patch, width], before positions."""
        check_images(images, name=self.config.name, channels=self.config.channels, size=self.config.image_size)
        if self._cuts(images):
            images = fused.cut_for(images, self.config.patch, self.patches.weight)
        return self.patches(images if self.resnet is None else self.resnet(images))  # type: ignore[no-any-return]

    def _cuts(self, images: Tensor) -> bool:
        """Whether images are cut into patches, and rounded, by a kernel; it has no gradient."""
        patches = self.patches
        if self.kernels == "plain" or self.resnet is not None or type(patches) is not PatchEmbedding or fused.is_heard(patches):
            return False
        return not images.requires_grad and images.device == patches.weight.device and fused.can_fuse(patches.weight)

    def assemble(self, patches: Tensor) -> Tensor:
        """z₀ of equation 1: prefix tokens, then patch embeddings, with their positions."""
        prefix = [token for token in (self.class_token, self.distill_token, self.registers) if token is not None]
        if self.kernels != "plain" and fused.can_fuse(patches):
            blank = torch.zeros(1, *patches.shape[1:], device=patches.device, dtype=self.norm.weight.dtype)
            x = fused.assembled(patches, self.positions.at_input(torch.cat([*prefix, blank], dim=1)))
        else:
            given = [token.expand(patches.shape[0], -1, -1).to(patches.dtype) for token in prefix]
            x = self.positions.at_input(torch.cat([*given, patches], dim=1) if given else patches)
        return self.dropout(x)  # type: ignore[no-any-return]

    def encode(self, x: Tensor, kept: dict[int, Tensor] | None = None, first: int | None = None) -> Tensor:
        """All blocks, and the final norm if the model has it before pooling; `kept` is filled with the layers it names.

        With `first` only so many prefix tokens come out: the last block then computes nothing else.
        """
        if not kept and self._can_fuse(x):
            return self._encode_fused(x, first)
        for number, block in enumerate(self.blocks):
            x, bias = self.positions.before_layer(x, number), self.positions.bias(number)
            few = first if number == len(self.blocks) - 1 else None
            x = self.recomputing.run(number, block, x, bias, few)
            if kept and number in kept:
                kept[number] = x
        return self._finished(x)

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def fusable(self) -> bool:
        """Whether the fused kernels know all parts of the encoder, as it is now."""
        inside = self.config.position_at != "input"  # positions that act in the layers
        return not inside and all(fused.is_plain(block) for block in self._blocks())

    def _can_fuse(self, x: Tensor) -> bool:
        return self.kernels != "plain" and fused.can_fuse(x) and self.fusable

    def _encode_fused(self, x: Tensor, first: int | None) -> Tensor:
        eight = self.kernels == "fp8" and self.training
        stream = fused.run_blocks(self._blocks(), x, recomputing=self.recomputing, first=first, eight=eight)
        x, normed = fused.add_norm(stream, self.norm, stream.x.dtype)
        return normed if self.config.final_norm == "before-pool" else x

    @property
    def _read(self) -> int | None:
        """How many tokens, from the first, the logits are read from; None: all."""
        return 1 + self.config.distill_token if self.config.pooling == "class" else None

    def _finished(self, x: Tensor) -> Tensor:
        """What pooling sees of the last block's tokens."""
        return self.norm(x) if self.config.final_norm == "before-pool" else x

    def _tokens(self, images: Tensor, kept: dict[int, Tensor] | None = None, first: int | None = None) -> Tensor:
        return self.encode(self.assemble(self.embed_patches(images)), kept, first)

    def _pooled(self, tokens: Tensor, token: int = 0) -> Tensor:
        if self.pool is not None:
            x: Tensor = self.pool(tokens)
        elif self.config.pooling == "mean":
            x = tokens[:, self.config.prefix :].mean(dim=1)
        else:
            x = tokens[:, token]
        return self.norm(x) if self.config.final_norm == "after-pool" else x

    def _logits(self, tokens: Tensor) -> Tensor:
        if self.distill_head is not None:
            one, two = self._both_logits(tokens, self.distill_head)
            return (one + two) / 2
        return self.head(self._represent(self._pooled(tokens)))  # type: ignore[no-any-return]

    def _both_logits(self, tokens: Tensor, distill_head: nn.Module) -> tuple[Tensor, Tensor]:
        return self.head(self._pooled(tokens)), distill_head(self._pooled(tokens, token=1))

    def _represent(self, pooled: Tensor) -> Tensor:
        return pooled if self.pre_logits is None else torch.tanh(self.pre_logits(pooled))

    def _new_head(self, outputs: int) -> nn.Module:
        return nn.Linear(self.config.pre_logits or self.config.width, outputs) if outputs else nn.Identity()
