"""The same Vision Transformer from other libraries, each with its own default numerics.

None of them is needed by Vitrail: one that is not installed is left out, and it is said how to get it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import ModelConfig, ViTConfig

# What each is called where packages are installed.
PACKAGE = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}


def missing(peer: str) -> str | None:
    """A sentence, if this peer is not installed."""
    package = PACKAGE[peer]
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{peer} is left out: {package} is not installed. To compare with it: pip install {package}"


def build(peer: str, config: ModelConfig) -> nn.Module:
    """The peer's model for our configuration: same sizes, class token, learned positions, biases, outputs."""
    if not comparable(config):
        raise VitrailError(f"{config.name} has no equal in {peer}: plain Vision Transformers with a class token are compared.")
    assert isinstance(config, ViTConfig)
    return _BUILDERS[peer](config)


def comparable(config: ModelConfig) -> bool:
    """Whether the peers' plain classes compute the same function."""
    if not isinstance(config, ViTConfig) or config.resnet is not None:
        return False
    square = config.image_size[0] == config.image_size[1] and config.patch[0] == config.patch[1]
    return square and config.pooling == "class" and config.prefix == 1 and config.position == "learned"


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
    """Hugging Face's model answers with an object; the others with a tensor."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def _hf(config: ViTConfig) -> nn.Module:
    from transformers import ViTConfig as HFConfig
    from transformers import ViTForImageClassification

    described = HFConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp,
        image_size=config.image_size[0],
        patch_size=config.patch[0],
        num_channels=config.channels,
        qkv_bias=config.qkv_bias,
    )
    described.num_labels = config.outputs
    return _Logits(ViTForImageClassification(described))


_BUILDERS: dict[str, Callable[[ViTConfig], nn.Module]] = {"timm": _timm, "torchvision": _torchvision, "hf": _hf}
