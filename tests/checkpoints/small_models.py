"""Small models of every kind that a format can store, with weights that make every parameter matter."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.report import Report
from vitrail.data.preprocess import preset
from vitrail.models import BiTConfig, Model, ModelConfig, ResNetConfig, ViTConfig, build_model

SMALL: dict[str, Any] = {"width": 32, "depth": 3, "heads": 4, "mlp": 64, "patch": (8, 8), "image_size": (32, 32), "outputs": 5}
HYBRID_RESNET = ResNetConfig(layers=(1, 2))
BIT_RESNET = ResNetConfig(
    layers=(1, 2), group_norm_eps=1e-5, standardise="sqrt(var+eps)", standardise_eps=1e-10, padding="symmetric", pool_fill="zero"
)

KINDS: dict[str, ModelConfig] = {
    "plain": ViTConfig(name="small", **SMALL),
    "no-head": ViTConfig(name="small", **{**SMALL, "outputs": 0}),
    "pre-logits": ViTConfig(name="small", pre_logits=24, **SMALL),
    "pooler": ViTConfig(name="small", pre_logits=32, **{**SMALL, "outputs": 0}),
    "gap": ViTConfig(name="small", class_token=False, pooling="mean", **SMALL),
    "no-qkv-bias": ViTConfig(name="small", qkv_bias=False, **SMALL),
    "rectangle": ViTConfig(name="small", **{**SMALL, "patch": (8, 4), "image_size": (32, 64)}),
    "grey": ViTConfig(name="small", channels=1, **SMALL),
    "free-class": ViTConfig(name="small", position_prefix=False, **SMALL),
    "map": ViTConfig(name="small", class_token=False, pooling="map", **SMALL),
    "sincos": ViTConfig(name="small", class_token=False, pooling="mean", position="sincos2d", position_prefix=False, **SMALL),
    "distilled": ViTConfig(name="small", distill_token=True, **SMALL),
    "registers": ViTConfig(name="small", registers=2, position_prefix=False, **SMALL),
    "fc-norm": ViTConfig(name="small", class_token=False, pooling="mean", final_norm="after-pool", **SMALL),
    "qk-norm": ViTConfig(name="small", qk_norm=True, **SMALL),
    "layer-scale": ViTConfig(name="small", layer_scale=1e-5, **SMALL),
    "hybrid": ViTConfig(name="small", resnet=HYBRID_RESNET, **{**SMALL, "patch": (1, 1)}),
    "hybrid-stem": ViTConfig(name="small", resnet=ResNetConfig(layers=()), **{**SMALL, "patch": (4, 4)}),
    "bit": BiTConfig(name="small", resnet=BIT_RESNET, image_size=(64, 64), outputs=5),
    "axial": ViTConfig(name="small", attention="axial", **SMALL),
    "relative": ViTConfig(name="small", position="relative", position_at="every-layer", position_prefix=False, **SMALL),
}

STORABLE: dict[str, tuple[str, ...]] = {
    "google": ("plain", "no-head", "pre-logits", "gap", "no-qkv-bias", "rectangle", "grey", "hybrid", "hybrid-stem"),
    "big-vision": ("plain", "no-head", "pre-logits", "gap", "rectangle", "free-class", "map", "sincos"),
    "bit": ("bit",),
    "timm": (
        *("plain", "no-head", "gap", "no-qkv-bias", "rectangle", "grey", "free-class", "map", "distilled", "registers"),
        *("fc-norm", "qk-norm", "layer-scale", "hybrid", "hybrid-stem", "bit"),
    ),
    "hf": ("plain", "no-head", "pooler", "no-qkv-bias", "rectangle", "grey"),
    "torchvision": ("plain", "no-head", "pre-logits", "rectangle"),
    "vitrail": tuple(KINDS),
}
SUFFIX = {
    "google": ".npz",
    "big-vision": ".npz",
    "bit": ".npz",
    "timm": ".safetensors",
    "hf": "",
    "torchvision": ".pth",
    "vitrail": "",
}


def random_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype | None = None) -> Model:
    """Return a model with no parameter at zero or one, so that a swapped or missing one changes the outputs."""
    model = build_model(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm_like = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if norm_like else (0.02 if parameter.ndim == 1 else 0.15) * noise)
    return (model.to(dtype) if dtype else model).eval()


def bundle_of(config: ModelConfig, seed: int = 0, dtype: torch.dtype | None = None) -> Bundle:
    model = random_model(config, seed, dtype)
    preprocess = preset("timm", size=config.image_size, channels=config.channels)
    return Bundle(model, preprocess, None, "classify", Report("here", "vitrail"))


def needed_fields(config: ModelConfig) -> dict[str, Any]:
    """Return what a reader cannot infer for these models, which have no published sizes."""
    fields: dict[str, Any] = {"grid": config.grid}
    return fields | ({"heads": config.heads} if isinstance(config, ViTConfig) else {})


def images_for(config: ModelConfig, count: int = 2) -> torch.Tensor:
    return torch.randn(count, config.channels, *config.image_size, generator=torch.Generator().manual_seed(7))


def assert_same_model(found: nn.Module, expected: nn.Module, config: ModelConfig) -> None:
    """Compare weights bit for bit, and logits in float64: in float32 a matmul's last bits depend on the weights' address."""
    state = expected.state_dict()
    assert found.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in found.state_dict().items())
    images = images_for(config).double()
    with torch.no_grad():
        logits, other = (copy.deepcopy(model).double()(images) for model in (found, expected))
    assert logits.dtype is torch.float64
    torch.testing.assert_close(logits, other, rtol=0, atol=1e-12)
