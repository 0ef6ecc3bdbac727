"""What a model costs, by arithmetic: nothing is built, so a table of fifty models is instant."""

from __future__ import annotations

from vitrail.models.config import BiTConfig, ModelConfig, ResNetConfig, ViTConfig


def parameters(config: ModelConfig) -> int:
    """Return the number of learned values."""
    if isinstance(config, BiTConfig):
        channels = config.resnet.out_channels
        convolutions = sum(i * o * k * k for i, o, k, _ in _convolutions(config.resnet, config.channels))
        return convolutions + _pre_activation_norms(config.resnet) + 2 * channels + (channels + 1) * config.outputs
    assert isinstance(config, ViTConfig)
    width = config.width
    total = (config.patch_channels * config.patch[0] * config.patch[1] + 1) * width
    if config.resnet:
        total += sum(i * o * k * k + 2 * o for i, o, k, _ in _convolutions(config.resnet, config.channels))
    total += config.prefix * width + _position_parameters(config)
    total += config.blocks * _block_parameters(config) + 2 * width
    if config.pooling == "map":
        total += _block_parameters(config, pooling=True) - width  # a block with one norm less, and a probe
    represented = config.pre_logits or width
    total += (width + 1) * config.pre_logits if config.pre_logits else 0
    return total + (represented + 1) * config.outputs * (2 if config.distill_token else 1)


def flops(config: ModelConfig) -> int:
    """Floating-point operations of one image's forward pass: a multiply-add counts as two, as the paper counts them.

    Matmuls, convolutions and attention; norms, activations and sums, well under 1 %, are left out.
    """
    if isinstance(config, BiTConfig):
        return _resnet_flops(config) + 2 * config.resnet.out_channels * config.outputs
    assert isinstance(config, ViTConfig)
    width, tokens = config.width, config.tokens
    total = embedding_flops(config) + (_resnet_flops(config) if config.resnet else 0)
    total += sum(_block_flops(config, tokens, _attended(config, block)) for block in range(config.blocks))
    if config.pooling == "map":
        total += 2 * width * (2 * width + 2 * config.mlp) + 4 * width * tokens * (width + 1)
    represented = config.pre_logits or width
    total += 2 * width * config.pre_logits if config.pre_logits else 0
    return total + 2 * represented * config.outputs * (2 if config.distill_token else 1)


def needed_flops(config: ModelConfig) -> int:
    """Operations that the logits need: fewer than `flops` where they are read from one token.

    Then the last block computes keys and values for all tokens, and everything else for that one alone.
    """
    total = flops(config)
    if not isinstance(config, ViTConfig) or config.pooling != "class":
        return total
    return total - unread_flops(config, config.tokens, 1 + config.distill_token, _attended(config, config.blocks - 1))


def embedding_flops(config: ViTConfig) -> int:
    """Return the FLOPs of the linear map of all patches."""
    return 2 * config.grid[0] * config.grid[1] * config.patch_channels * config.patch[0] * config.patch[1] * config.width


def encoder_flops(config: ViTConfig, tokens: int) -> int:
    """Return the FLOPs of all blocks, with full attention, over so many tokens."""
    return config.blocks * _block_flops(config, tokens, tokens**2)


def unread_flops(config: ViTConfig, tokens: int, read: int, pairs: int | None = None) -> int:
    """Return the FLOPs that the last block saves when only `read` of its tokens are computed, which attend to all.

    `pairs` are those of query and key in that block; None: full attention.
    """
    own = 2 * config.width * (2 * config.width + 2 * config.mlp)  # query, output projection, MLP
    return (tokens - read) * own + 4 * config.width * ((tokens**2 if pairs is None else pairs) - read * tokens)


def _block_flops(config: ViTConfig, tokens: int, pairs: int) -> int:
    return 2 * tokens * config.width * (4 * config.width + 2 * config.mlp) + 4 * config.width * pairs


def _attended(config: ViTConfig, block: int) -> int:
    """Pairs of query and key in a block's attention."""
    if config.attention == "full":
        return config.tokens**2
    line = config.grid[1 - block % 2]
    return config.prefix * config.tokens + (config.tokens - config.prefix) * (config.prefix + line)


def _block_parameters(config: ViTConfig, pooling: bool = False) -> int:
    width = config.width
    attention = 4 * width * width + width + (3 * width if config.qkv_bias else 0)
    attention += 4 * (width // config.heads) if config.qk_norm and not pooling else 0
    mlp = 2 * width * config.mlp + width + config.mlp
    return attention + mlp + 4 * width + (2 * width if config.layer_scale is not None and not pooling else 0)


def _position_parameters(config: ViTConfig) -> int:
    rows, columns = config.grid
    tables = config.blocks if config.position_at == "every-layer" else 1
    covered = config.prefix if config.position_prefix else 0
    if config.position == "learned":
        return tables * (covered + rows * columns) * config.width
    if config.position == "learned-2d":
        return tables * (covered * config.width + (rows + columns) * (config.width // 2))
    if config.position == "relative":
        return tables * config.heads * ((2 * rows - 1) * (2 * columns - 1) + (3 if config.prefix else 0))
    return 0


def _convolutions(resnet: ResNetConfig, channels: int) -> list[tuple[int, int, int, int]]:
    """Return every convolution as (channels in, filters, kernel, stride of its output against the image)."""
    width = resnet.width
    found, channels, stride = [(channels, width, 7, 2)], width, 4
    for stage, count in enumerate(resnet.layers):
        filters = width * 2**stage
        for unit in range(count):
            before, stride = stride, stride * (2 if stage and not unit else 1)
            found += [(channels, filters, 1, before), (filters, filters, 3, stride), (filters, 4 * filters, 1, stride)]
            found += [(channels, 4 * filters, 1, stride)] if not unit else []
            channels = 4 * filters
    return found


def _pre_activation_norms(resnet: ResNetConfig) -> int:
    total, channels = 0, resnet.width
    for stage, count in enumerate(resnet.layers):
        filters = resnet.width * 2**stage
        for _ in range(count):
            total += 2 * channels + 4 * filters
            channels = 4 * filters
    return total


def _resnet_flops(config: ModelConfig) -> int:
    resnet = config.resnet  # type: ignore[attr-defined]
    height, width = config.image_size
    maps = ((-(-height // s) * -(-width // s), i * o * k * k) for i, o, k, s in _convolutions(resnet, config.channels))
    return sum(2 * positions * multiply_adds for positions, multiply_adds in maps)
