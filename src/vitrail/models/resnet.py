"""Standardised convolutions with GroupNorm: the parts of both ResNets of the paper, and the hybrids' post-activation one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import ResNetConfig


class StandardisedConv(nn.Module):
    """A convolution whose filters are brought to zero mean and unit deviation at each use (weight standardisation)."""

    def __init__(self, config: ResNetConfig, channels: int, filters: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.config, self.kernel, self.stride = config, kernel, stride
        self.weight = nn.Parameter(torch.empty(filters, channels, kernel, kernel))

    def standardised(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight.float(), dim=(1, 2, 3), keepdim=True, correction=0)
        eps = self.config.standardise_eps
        scale = variance.sqrt() + eps if self.config.standardise == "std+eps" else (variance + eps).sqrt()
        return (self.weight - mean) / scale

    def forward(self, x: Tensor) -> Tensor:
        x = pad_map(x, self.config, self.kernel, self.stride, fill=0.0)
        return F.conv2d(x, self.standardised().to(x.dtype), stride=self.stride)


def pad_map(x: Tensor, config: ResNetConfig, kernel: int, stride: int, fill: float) -> Tensor:
    """Pad a map for a window, as the configuration says: evenly, or as TensorFlow's SAME does, which depends on the size."""
    if config.padding == "symmetric":
        top = bottom = left = right = (kernel - 1) // 2
    else:
        (top, bottom), (left, right) = (_same(size, kernel, stride) for size in x.shape[-2:])
    return F.pad(x, (left, right, top, bottom), value=fill) if top or bottom or left or right else x


def _same(size: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def max_pool(x: Tensor, config: ResNetConfig) -> Tensor:
    """Apply the stem's 3×3 max-pool of stride 2. What is outside the map matters where no ReLU came before it."""
    fill = 0.0 if config.pool_fill == "zero" else float("-inf")
    return F.max_pool2d(pad_map(x, config, kernel=3, stride=2, fill=fill), kernel_size=3, stride=2)


def group_norm(config: ResNetConfig, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(config.groups, channels, eps=config.group_norm_eps)


class PostActivationUnit(nn.Module):
    """1×1, 3×3, 1×1 convolutions, each normalised, ReLU after the sum (the original ResNet's order)."""

    def __init__(self, config: ResNetConfig, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = StandardisedConv(config, channels, filters, 1), group_norm(config, filters)
        self.conv2, self.norm2 = StandardisedConv(config, filters, filters, 3, stride), group_norm(config, filters)
        self.conv3, self.norm3 = StandardisedConv(config, filters, 4 * filters, 1), group_norm(config, 4 * filters)
        projected = channels != 4 * filters or stride != 1
        self.projection = StandardisedConv(config, channels, 4 * filters, 1, stride) if projected else None
        self.projection_norm = group_norm(config, 4 * filters) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.projection is not None and self.projection_norm is not None:
            shortcut = self.projection_norm(self.projection(x))
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return F.relu(shortcut + self.norm3(self.conv3(x)))


class HybridStem(nn.Module):
    """The ResNet that makes a hybrid's feature map: root, max-pool, then as many stages as `layers` names."""

    def __init__(self, config: ResNetConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.root, self.norm = StandardisedConv(config, channels, width, 7, 2), group_norm(config, width)
        self.stages = build_stages(config, PostActivationUnit)

    def forward(self, images: Tensor) -> Tensor:
        x = max_pool(F.relu(self.norm(self.root(images))), self.config)
        for stage in self.stages:
            x = stage(x)
        return x


def build_stages(config: ResNetConfig, unit: type[nn.Module]) -> nn.ModuleList:
    """Stages of units; every stage but the first halves the map in its first unit."""
    stages, channels = nn.ModuleList(), config.width
    for number, count in enumerate(config.layers):
        filters, units = config.width * 2**number, []
        for index in range(count):
            units.append(unit(config, channels, filters, 2 if number and not index else 1))
            channels = 4 * filters
        stages.append(nn.Sequential(*units))
    return stages
