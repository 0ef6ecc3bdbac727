"""The module that is exported: a plain copy of the model, with constants folded and float32 at both ends."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.models import Model
from vitrail.models.config import Pair
from vitrail.models.resnet import StandardisedConv, pad_map


class Exported(nn.Module):
    """`images → logits`, float32 at both ends whatever the precision of the weights.

    With `preprocess`, images are pixels [batch, height, width, channels] from 0 to 255, already of the model's size, and are
    normalised in the graph: uint8, or float32 where the preprocessing does not round what it resized. Otherwise they are
    normalised float32 [batch, channels, height, width].
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, dtype: torch.dtype, preprocess: Preprocess | None = None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        self.takes_pixels = preprocess is not None
        self.pixel_type = torch.float32 if preprocess is not None and preprocess.rounding == "none" else torch.uint8
        if preprocess is not None:
            scale = torch.tensor(preprocess.std, dtype=torch.float64) * preprocess.max_value
            mean = torch.tensor(preprocess.mean, dtype=torch.float64) * preprocess.max_value
            self.register_buffer("scale", (1 / scale).float()[:, None, None])
            self.register_buffer("mean", mean.float()[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        if self.takes_pixels:
            images = (images.permute(0, 3, 1, 2).float() - self.mean) * self.scale
        return self.model(images.to(self.dtype)).float()  # type: ignore[no-any-return]

    def example(self, batch: int, size: Pair, channels: int) -> Tensor:
        """Return an input of the right shape and type."""
        generator = torch.Generator().manual_seed(0)
        if self.takes_pixels:
            return torch.randint(0, 256, (batch, *size, channels), generator=generator).to(self.pixel_type)
        return torch.randn(batch, channels, *size, generator=generator)


class _FoldedConv(nn.Module):
    """A standardised convolution with its weights standardised once, since they no longer change."""

    def __init__(self, conv: StandardisedConv) -> None:
        super().__init__()
        self.config, self.kernel, self.stride = conv.config, conv.kernel, conv.stride
        self.weight = nn.Parameter(conv.standardised().to(conv.weight.dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(pad_map(x, self.config, self.kernel, self.stride, fill=0.0), self.weight, stride=self.stride)


class _Float32Norm(nn.Module):
    """A norm that computes in float32, with casts around it that every runtime sees: squares overflow float16 beyond 255."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).to(x.dtype)  # type: ignore[no-any-return]


def exported_module(
    model: Model, dtype: torch.dtype, *, image_size: int | Pair | None = None, preprocess: Preprocess | None = None
) -> Exported:
    """Return a copy on the CPU, in evaluation mode, without fused kernels, resized and in the precision `dtype`."""
    if preprocess is not None and preprocess.bits != 8:
        raise VitrailError(f"Pixels of {preprocess.bits} bits cannot be normalised in the graph; export without --pixels.")
    copied = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    if image_size is not None:
        copied.resize(image_size)
    if hasattr(copied, "kernels"):
        copied.kernels = "plain"
    with torch.no_grad():
        fold_convolutions(copied)
    norms = copy.deepcopy(copied) if dtype != torch.float32 else None
    copied = copied.to(dtype)
    if norms is not None:
        keep_norms_in_float32(copied, norms)
    return Exported(copied, dtype, preprocess)


def fold_convolutions(module: nn.Module) -> None:
    """Replace every standardised convolution, at any depth, by one with constant weights."""
    for name, child in module.named_children():
        if isinstance(child, StandardisedConv):
            setattr(module, name, _FoldedConv(child))
        else:
            fold_convolutions(child)


def keep_norms_in_float32(module: nn.Module, exact: nn.Module) -> None:
    """Replace every norm, at any depth, by that of `exact`, the same module in float32."""
    for (name, child), other in zip(module.named_children(), exact.children(), strict=True):
        if isinstance(child, (nn.LayerNorm, nn.GroupNorm)):
            setattr(module, name, _Float32Norm(other))
        else:
            keep_norms_in_float32(child, other)
