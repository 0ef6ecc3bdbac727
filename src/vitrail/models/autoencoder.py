"""Masked autoencoding (MAE, He et al. 2021): the encoder sees a quarter of the patches, a small decoder predicts the rest.

Not in the ViT paper. It is here because it is the stronger way to pre-train without labels, and because an encoder that runs on a
quarter of the tokens makes it cheap.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError, counted
from vitrail.models.config import ViTConfig
from vitrail.models.cost import embedding_flops, encoder_flops, unread_flops
from vitrail.models.fused.dispatch import ResidualStream
from vitrail.models.initialisation import initialise_parts, small_normal_
from vitrail.models.masked import Pretraining, gather_tokens, num_masked_of, prefix_indices
from vitrail.models.resample import sincos_table
from vitrail.models.vit import Block, ViT

_HEAD = 32  # channels of a decoder's head, as its authors have it


class MaskedAutoencoder(Pretraining):
    """Drops `rate` of the patches after their positions were added, encodes the others, and predicts the dropped patches' pixels.

    The decoder gets the encoded tokens, and a learned [mask] for every dropped patch, each with a fixed position.
    """

    draws = 1
    positions: Tensor

    def __init__(self, encoder: ViT, outputs: int, rate: float = 0.75, *, width: int = 512, depth: int = 4) -> None:
        config = encoder.config
        check_droppable(config)
        super().__init__(encoder, num_masked_of(rate, config))
        if self.num_masked >= self.patches:
            raise VitrailError(f"A mask rate of {rate:g} leaves none of the {self.patches} patches to see; lower it.")
        self.decoder = decoder_config(config, width, depth)
        self.narrow = nn.Linear(config.width, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.decoder_blocks = nn.ModuleList(Block(self.decoder, number) for number in range(depth))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.head = nn.Linear(width, outputs)
        self.register_buffer("positions", sincos_table(config.grid, width), persistent=False)

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.blocks, *self.decoder_blocks]

    def reset(self, generator: torch.Generator | None = None) -> None:
        for module in (self.decoder_blocks, self.norm):
            initialise_parts(module, generator, self.config.init)
        with torch.no_grad():
            nn.init.normal_(self.mask_token, std=0.02, generator=generator)
            for layer in (self.narrow, self.head):
                if self.config.init == "small":
                    small_normal_(layer.weight, generator)
                else:
                    nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        order = noise[..., 0].argsort(dim=1)
        masked, seen = order[:, : self.num_masked], order[:, self.num_masked :]
        return self.head(self.decode(self.encode(images, seen), masked, seen)), masked

    def encode(self, images: Tensor, seen: Tensor) -> Tensor:
        """Encode the prefix tokens and the patches with indices `seen` [image, index], and nothing else."""
        tokens, prefix = self.encoder.add_prefix_and_positions(self._embed(images)), self.config.prefix
        visible = gather_tokens(tokens, torch.cat([prefix_indices(seen, prefix), seen + prefix], dim=1))
        return self._normed(self.encoder.encode(visible))

    def decode(self, encoded: Tensor, masked: Tensor, seen: Tensor) -> Tensor:
        """Return the decoder's output, normed, for the masked patches [image, index, width]."""
        prefix = self.config.prefix
        narrow: Tensor = self.narrow(encoded)
        x = torch.cat(
            [
                # Masked patches first, so that the last block can leave out the others: positions say where each one is.
                self.mask_token + self.positions[masked],
                narrow[:, :prefix].to(self.positions.dtype),
                narrow[:, prefix:] + self.positions[seen],
            ],
            dim=1,
        )
        stream = ResidualStream(x, self.encoder.kernels)
        for number, block in enumerate(self.decoder_blocks):
            stream.run(number, block, num_queries=self.num_masked if number == len(self.decoder_blocks) - 1 else None)
        return stream.normed(self.norm)

    def flops(self) -> int:
        config, seen = self.config, self.config.tokens - self.num_masked
        between = 2 * seen * config.width * self.decoder.width + 2 * self.num_masked * self.decoder.width * self.head.out_features
        decoding = encoder_flops(self.decoder, config.tokens) - unread_flops(self.decoder, config.tokens, self.num_masked)
        return embedding_flops(config) + encoder_flops(config, seen) + between + decoding


def check_droppable(config: ViTConfig) -> None:
    """Refuse encoders that cannot run on some of their patches, or that would have seen the others."""
    reason = None
    if config.resnet is not None:
        reason = "its ResNet has looked at the whole image before any patch is dropped, so there is nothing left to guess"
    elif config.attention != "full":
        reason = "axial attention needs whole rows and columns of patches"
    elif config.position_at != "input":
        reason = f"its {config.position} positions act inside the layers, which know only the whole grid"
    if reason is not None:
        raise VitrailError(
            f"Masked autoencoding drops patches from the encoder, which {config.name} does not allow: {reason}. Use a plain "
            "ViT with positions added at the input, or the task masked-patch, which keeps all patches."
        )


def decoder_config(config: ViTConfig, width: int, depth: int) -> ViTConfig:
    """Return the configuration of the decoder: the encoder's numerics in another size, without its regularisation."""
    if width < _HEAD or width % _HEAD or depth < 1:
        raise VitrailError(
            f"The decoder has {counted(depth, 'block')} of width {width}; it needs at least 1 block, and a width that is a "
            f"multiple of {_HEAD}."
        )
    return config.replace(
        name="decoder", width=width, depth=depth, heads=width // _HEAD, mlp=4 * width, layer_scale=None,
        dropout=0.0, attention_dropout=0.0, stochastic_depth=0.0, position="sincos2d", position_prefix=False, pre_logits=None,
    )  # fmt: skip
