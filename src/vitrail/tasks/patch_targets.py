"""What is predicted about a hidden patch: its mean colour, its colours on a 4×4 grid, or its pixels.

Targets are made from the pixels as they were before normalisation, whatever the preprocessing. Colours are counted in whole
numbers, so that a patch whose mean lies exactly between two bins falls into the same one on every device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.models.fused.cross_entropy import cross_entropy
from vitrail.models.layers import patchify
from vitrail.tasks.base import Array

LEVELS = 8  # 3 bits per channel
Pair = tuple[int, int]


class PatchTarget(ABC):
    """One kind of target. `stride` is the size of a patch in pixels of the input."""

    outputs: int
    """Numbers to be predicted for a patch."""
    cells = 1
    """Along each side of a patch: in how many parts its colours are counted."""

    def __init__(self, preprocess: Preprocess, stride: Pair) -> None:
        self.channels, self.stride, self.max_value = preprocess.channels, stride, preprocess.max_value
        self.grid = preprocess.size[0] // stride[0], preprocess.size[1] // stride[1]
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (preprocess.mean, preprocess.std))
        self._scale, self._shift = ((one * self.max_value).float()[:, None, None] for one in (std, mean))
        self._digit_values = LEVELS ** torch.arange(min(self.channels, 3) - 1, -1, -1)

    @property
    def classes(self) -> int:
        """Bins of a colour: 512 for three channels."""
        return int(LEVELS ** len(self._digit_values))

    def to(self, device: Any) -> None:
        self._scale, self._shift, self._digit_values = (one.to(device) for one in (self._scale, self._shift, self._digit_values))

    def pixels(self, images: Tensor) -> Tensor:
        """Normalised images [image, channel, row, column] as the whole pixel values they were, in float32."""
        return torch.addcmul(self._shift, images.float(), self._scale).round_().clamp_(0, self.max_value)

    def bins(self, images: Tensor) -> Tensor:
        """Return the colour of every patch as a class [image, patch, cell]: 3 bits for each of (at most three) channels."""
        rows, columns = self.grid
        repeats = [self.cells // math.gcd(side, self.cells) for side in self.stride]  # 14 pixels in 4 cells: halve the pixels
        pixels = self.pixels(images)[:, : len(self._digit_values)].int()
        for axis, count in zip((2, 3), repeats, strict=True):
            pixels = pixels.repeat_interleave(count, axis) if count > 1 else pixels
        height, width = (side * count // self.cells for side, count in zip(self.stride, repeats, strict=True))
        shape = (len(images), -1, rows, self.cells, height, columns, self.cells, width)
        sums = pixels.reshape(shape).sum(dim=(4, 7)).permute(0, 2, 4, 3, 5, 1)
        sums = sums.reshape(len(images), rows * columns, self.cells**2, -1)
        levels = (sums * LEVELS).div(self.max_value * height * width, rounding_mode="floor").clamp(max=LEVELS - 1)
        return (levels * self._digit_values).sum(dim=-1)

    def patches(self, images: Tensor) -> Tensor:
        """Pixels from 0 to 1, cut into patches [image, patch, channel · row · column]."""
        return patchify(self.pixels(images) / self.max_value, self.stride)

    @abstractmethod
    def of(self, images: Tensor) -> Tensor:
        """Return the targets of all patches [image, patch, …]."""

    @abstractmethod
    def loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the patches of every image [image], in float32."""

    @abstractmethod
    def tally(self, targets: Tensor) -> dict[str, Array | float]:
        """Sums over patches from which the loss of the best constant prediction follows."""

    @abstractmethod
    def constant_loss(self, sums: dict[str, Any]) -> float:
        """Return the loss of the best constant prediction."""

    @abstractmethod
    def to_pixels(self, predicted: Tensor, patches: Tensor) -> Tensor:
        """Predictions as pixels from 0 to 1, like the true `patches` [image, patch, channel · row · column]."""

    def histogram(self, bins: Tensor) -> Array:
        """Return how often each class occurs [cell, class]."""
        cells = torch.arange(bins.shape[-1], device=bins.device)
        counted = torch.bincount((bins + cells * self.classes).flatten(), minlength=bins.shape[-1] * self.classes)
        return np.asarray(counted.cpu().numpy()).reshape(bins.shape[-1], self.classes)


class Colours(PatchTarget):
    """Classes: the mean colour (one cell), or that of every cell of a 4×4 grid. The loss is the cross-entropy, in nats."""

    def __init__(self, preprocess: Preprocess, stride: Pair, cells: int = 1) -> None:
        super().__init__(preprocess, stride)
        if self.channels > 3:
            raise VitrailError(
                f"Colours in 3 bits per channel are for up to 3 channels; these images have {self.channels}. "
                "Use --task.patch-target pixels."
            )
        if min(stride) < cells:
            raise VitrailError(
                f"A patch of {stride[0]}×{stride[1]} pixels cannot be downsized to {cells}×{cells}. "
                "Use --task.patch-target mean-colour or pixels."
            )
        self.cells = cells
        self.outputs = cells**2 * self.classes

    def of(self, images: Tensor) -> Tensor:
        return self.bins(images)

    def logits(self, predicted: Tensor) -> Tensor:
        """[image, patch, cell, class]"""
        return predicted.reshape(*predicted.shape[:-1], self.cells**2, self.classes)

    def loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(self.logits(predicted).flatten(0, 2), targets.flatten())
        return losses.reshape(len(targets), -1).mean(1)

    def tally(self, targets: Tensor) -> dict[str, Array | float]:
        return {"histogram": self.histogram(targets)}

    def constant_loss(self, sums: dict[str, Any]) -> float:
        return entropy(sums["histogram"])

    def to_pixels(self, predicted: Tensor, patches: Tensor) -> Tensor:
        return self.colours(self.logits(predicted).argmax(-1))

    def colours(self, bins: Tensor) -> Tensor:
        """Classes [image, patch, cell] as pixels of whole patches, each cell in the middle colour of its bin."""
        digits = bins[..., None].div(self._digit_values, rounding_mode="floor") % LEVELS
        cells = ((digits + 0.5) / LEVELS).movedim(-1, 2).unflatten(-1, (self.cells, self.cells))
        return F.interpolate(cells.flatten(0, 1), self.stride, mode="nearest").reshape(*bins.shape[:2], -1)


class PixelValues(PatchTarget):
    """Regression on all pixels of the patch with a squared error, a mean over its values.

    `normalised` subtracts each patch's own mean and divides by its deviation first, as masked autoencoding does.
    """

    def __init__(self, preprocess: Preprocess, stride: Pair, normalised: bool = False) -> None:
        super().__init__(preprocess, stride)
        self.normalised = normalised
        self.outputs = self.channels * stride[0] * stride[1]

    def of(self, images: Tensor) -> Tensor:
        patches = self.patches(images)
        if not self.normalised:
            return patches
        mean, deviation = _moments(patches)
        return (patches - mean) / deviation

    def loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        return (predicted.float() - targets).square().mean(dim=(1, 2))

    def tally(self, targets: Tensor) -> dict[str, Array | float]:
        values = targets.flatten(0, 1).double()
        return {"patches": len(values), "first": values.sum(0).cpu().numpy(), "second": float(values.square().sum())}

    def constant_loss(self, sums: dict[str, Any]) -> float:
        count, first = float(sums["patches"]), sums["first"]
        return max(float(sums["second"]) / count - float(np.square(first / count).sum()), 0.0) / len(first)

    def to_pixels(self, predicted: Tensor, patches: Tensor) -> Tensor:
        if self.normalised:  # mean and deviation are not predicted: those of the true patch are used
            mean, deviation = _moments(patches)
            predicted = predicted.float() * deviation + mean
        return predicted.float().clamp(0, 1)


def _moments(patches: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def entropy(histogram: Array) -> float:
    """Return the entropy of counts [cell, class] in nats, the mean over cells: also the loss of the best constant prediction."""
    rates = histogram / histogram.sum(axis=1, keepdims=True)
    return max(0.0, float(-(rates * np.log(np.where(rates > 0, rates, 1))).sum(axis=1).mean()))  # not −0.0, which is shown
