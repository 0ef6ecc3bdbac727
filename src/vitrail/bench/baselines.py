"""Build the same Vision Transformer from other libraries, each with its own default numerics.

Vitrail needs none of them: a library that is not installed is skipped, with a message on how to install it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import ModelConfig, ViTConfig

# The package to install for each library.
PACKAGE = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}


def missing(library: str) -> str | None:
    """Return a message if this library is not installed."""
    package = PACKAGE[library]
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{library} is skipped: {package} is not installed. To compare with it: pip install {package}"


def build(library: str, config: ModelConfig) -> nn.Module:
    """Build the library's model with our sizes, class token, learned positions, biases and outputs."""
    if not comparable(config):
        raise VitrailError(
            f"{config.name} has no equivalent in {library}. Only plain Vision Transformers with a class token can be compared."
        )
    assert isinstance(config, ViTConfig)
    return _BUILDERS[library](config)


def comparable(config: ModelConfig) -> bool:
    """Return whether the other libraries' plain ViT classes compute the same function."""
    if not isinstance(config, ViTConfig) or config.resnet is not None:
        return False
    square = config.image_size[0] == config.image_size[1] and config.patch[0] == config.patch[1]
    return square and config.pooling == "class" and config.prefix == 1 and config.position == "learned" and not config.qk_norm


def _timm(config: ViTConfig) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(  # type: ignore[no-any-return, unused-ignore]
        img_size=config.image_size[0],
        patch_size=config.patch[0],
        in_chans=config.channels,
        num_classes=config.outputs,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp / config.width,
        qkv_bias=config.qkv_bias,
    )


def _torchvision(config: ViTConfig) -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(
        image_size=config.image_size[0],
        patch_size=config.patch[0],
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp,
        num_classes=config.outputs,
    )
    return model


class _Logits(nn.Module):
    """Return the logits tensor of Hugging Face's output object."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def _hf(config: ViTConfig) -> nn.Module:
    from transformers import ViTConfig as HFConfig
    from transformers import ViTForImageClassification

    hf_config = HFConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp,
        image_size=config.image_size[0],
        patch_size=config.patch[0],
        num_channels=config.channels,
        qkv_bias=config.qkv_bias,
    )
    hf_config.num_labels = config.outputs
    return _Logits(ViTForImageClassification(hf_config))


_BUILDERS: dict[str, Callable[[ViTConfig], nn.Module]] = {"timm": _timm, "torchvision": _torchvision, "hf": _hf}
