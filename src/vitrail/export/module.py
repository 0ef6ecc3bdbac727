"""The module that is exported: a plain copy of the model, with constants folded and float32 at both ends."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.export.graph_preprocess import GraphPreprocess
from vitrail.export.settings import Input
from vitrail.models import Model
from vitrail.models.bit import PreActivationUnit
from vitrail.models.config import Pair
from vitrail.models.layers import PatchEmbedding
from vitrail.models.resnet import PostActivationUnit, StandardisedConv, pad_map
from vitrail.models.vit import Block

_COMPARED = (PatchEmbedding, Block, PreActivationUnit, PostActivationUnit)


class Exported(nn.Module):
    """`images → logits`, float32 at both ends whatever the precision of the weights. What it takes is `input`:

    - normalised: float32 [batch, channels, height, width] of the model's size.
    - pixels: [batch, height, width, channels] from 0 to 255 of the model's size, normalised in the graph: uint8, or float32 where
      the preprocessing does not round what it resized, or pads with the mean colour.
    - images: uint8 [batch, height, width, channels] of any size, resized, cropped and normalised in the graph.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, input: Input = "normalised", preprocess: Preprocess | None = None
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.input = model, dtype, input
        self.input_type = torch.float32
        self.preprocess: GraphPreprocess | None = None
        if preprocess is None or input == "normalised":
            return
        if input == "images":
            self.preprocess = GraphPreprocess(preprocess)
        if input == "images" or (preprocess.rounding != "none" and not preprocess.pad):
            self.input_type = torch.uint8
        scale = torch.tensor(preprocess.std, dtype=torch.float64) * preprocess.max_value
        mean = torch.tensor(preprocess.mean, dtype=torch.float64) * preprocess.max_value
        self.register_buffer("scale", (1 / scale).float()[:, None, None])
        self.register_buffer("mean", mean.float()[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        if self.input != "normalised":
            pixels = images.permute(0, 3, 1, 2).float() if self.preprocess is None else self.preprocess(images)
            images = (pixels - self.mean) * self.scale
        return self.model(images.to(self.dtype)).float()  # type: ignore[no-any-return]

    def example(self, batch: int, size: Pair, channels: int) -> Tensor:
        """Return an input of the right shape and type."""
        generator = torch.Generator().manual_seed(0)
        if self.input == "normalised":
            return torch.randn(batch, channels, *size, generator=generator)
        if self.input == "images":
            size = (size[0] + 3, size[1] + 5)  # any size that is not the model's
        return torch.randint(0, 256, (batch, *size, channels), generator=generator).to(self.input_type)

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any]]:
        """Say which sizes of the input are free: the batch; for images also height and width."""
        names = ("batch", "height", "width") if self.input == "images" else ("batch",)
        return ({axis: torch.export.Dim(name, min=1) for axis, name in enumerate(names)},)


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
    model: Model,
    dtype: torch.dtype,
    *,
    image_size: int | Pair | None = None,
    input: Input = "normalised",
    preprocess: Preprocess | None = None,
) -> Exported:
    """Return a copy on the CPU, in evaluation mode, without fused kernels, resized and in the precision `dtype`."""
    if preprocess is not None and preprocess.resize == "keep-aspect":
        raise VitrailError(
            "This preprocessing keeps the aspect ratio, so its images differ in size, but an exported model takes one size. "
            "Give another one with --preprocess."
        )
    if input != "normalised" and preprocess is not None and preprocess.bits != 8:
        option = "--pixels" if input == "pixels" else "--resize-in-graph"
        raise VitrailError(f"Pixels of {preprocess.bits} bits cannot be normalised in the graph; export without {option}.")
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
    return Exported(copied, dtype, input, preprocess)


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


def block_names(model: nn.Module) -> list[str]:
    """Return the names of the modules whose outputs can be compared: patch embedding, encoder blocks, units of ResNets."""
    return [name for name, module in model.named_modules() if isinstance(module, _COMPARED)]


def block_outputs(names: Iterable[str], nodes: Iterable[tuple[Any, Sequence[str]]]) -> dict[str, Any]:
    """Return the output of each named module in an exported graph: the last of the nodes inside it.

    `nodes` are in the order of computation, each with the paths of the modules that it is in.
    """
    wanted, found = {f"model.{name}": name for name in names}, {}
    for node, modules in nodes:
        found.update({wanted[path]: node for path in modules if path in wanted})
    return found
