"""Preprocessing inside the exported graph: images of any size in, pixels of the model's size out, as `Preprocess.pixels` has them.

ONNX's own Resize differs from Pillow in the filter's width, its cubic coefficient and its rounding, and runtimes differ among
themselves. So a resize is two matmuls here, whose weights are computed from the image's size with basic operators.
Only pixels of the centre crop are computed: the output's size is fixed, and the crop is an offset in the weights.

Weights are computed in float64, because Pillow's are: rounded to its 22 bits, they give its integers bit for bit. Only of an image
more than 100 times as high as wide they do not: Pillow resizes its height first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError

_PILLOW_BITS = 22  # of the weights with which Pillow resizes 8-bit images
_SUPPORT = {"area": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
Pair = tuple[Tensor, Tensor]


class GraphPreprocess(nn.Module):
    """uint8 [batch, height, width, channels] of any height and width → float32 [batch, channels, *size], from 0 to 255."""

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        if preprocess.interpolation == "nearest" and preprocess.antialias and preprocess.resize != "none":
            raise VitrailError("Pillow's nearest interpolation cannot be computed in the graph; export without --resize-in-graph.")
        self.steps = preprocess

    def forward(self, images: Tensor) -> Tensor:
        steps = self.steps
        indices = [torch.arange(images.shape[axis], dtype=torch.float64, device=images.device) for axis in (1, 2)]
        lengths = indices[0][-1] + 1, indices[1][-1] + 1
        resized = self._resized(*lengths)
        wanted = [self._positions(axis, resized[axis]) for axis in (0, 1)]
        pixels = images.permute(0, 3, 1, 2)
        if steps.resize == "none" or steps.interpolation == "nearest":
            rows, columns = (self._nearest(wanted[axis], lengths[axis] / resized[axis], lengths[axis]) for axis in (0, 1))
            pixels = pixels.index_select(2, rows).index_select(3, columns).float()
        else:
            weigh = self._pillow_weights if steps.antialias else self._tensorflow_weights
            rows, columns = (weigh(wanted[axis], indices[axis], lengths[axis], resized[axis]) for axis in (0, 1))
            pixels = self._product(pixels.double(), rows, columns)
        return self._padded(pixels, wanted, resized) if steps.pad else pixels

    def _resized(self, height: Tensor, width: Tensor) -> Pair:
        """Return the size after resizing, before the centre is cropped; see `Preprocess._resized`."""
        steps = self.steps
        if steps.resize == "none":
            return height, width
        if steps.resize == "square" and steps.pad:
            fit = torch.minimum(steps.size[0] / height, steps.size[1] / width)
            return (height * fit).round().clamp(min=1), (width * fit).round().clamp(min=1)
        if steps.resize_to is None:
            return _constants(height, *steps.size)
        box = [steps.resize_to * side / min(steps.size) for side in steps.size]
        exact = _constants(height, *(round(side) for side in box))
        if steps.resize == "square":
            return exact
        rows, columns = self._long_side(exact[1], height, width, 0), self._long_side(exact[0], width, height, 1)
        tight = box[0] * width >= box[1] * height  # the image exactly fills the box from top to bottom
        return torch.where(tight, exact[0], rows), torch.where(tight, columns, exact[1])

    def _long_side(self, exact: Tensor, side: Tensor, tight: Tensor, axis: int) -> Tensor:
        """Return the length that `side` gets where the other side, `tight`, gets the length `exact`."""
        if self.steps.geometry == "tensorflow":
            scaled = (side.float() * (exact.float() / tight.float())).round().double()
        else:
            scaled = (exact * side / tight).floor()
        return scaled.clamp(min=self.steps.size[axis])

    def _positions(self, axis: int, resized: Tensor) -> Tensor:
        """Return where the rows or columns of the output lie in the resized image; those of a padding lie outside."""
        size = self.steps.size[axis]
        half = (resized - size).clamp(min=0) / 2
        start = half.floor() if self.steps.geometry == "tensorflow" else half.round()
        if self.steps.pad:
            start = start - ((size - resized).clamp(min=0) / 2).floor()
        return torch.arange(size, dtype=torch.float64, device=resized.device) + start

    def _nearest(self, wanted: Tensor, scale: Tensor, length: Tensor) -> Tensor:
        found = wanted if self.steps.resize == "none" else ((wanted.float() + 0.5) * scale.float()).floor().double()
        if self.steps.pad or self.steps.resize != "none":
            found = torch.minimum(found.clamp(min=0), length - 1)
        return found.long()  # of an image that is too small and not padded, an index beyond its end: the runtime refuses it

    def _pillow_weights(self, wanted: Tensor, index: Tensor, length: Tensor, resized: Tensor) -> Tensor:
        """Return [output, input] weights, in the order of Pillow's operations: its filter is widened when downscaling."""
        scale = length / resized
        widened = scale.clamp(min=1)
        support = _SUPPORT[self.steps.interpolation] * widened
        centre = ((wanted + 0.5) * scale)[:, None]
        first = (centre - support + 0.5).clamp(min=0).floor()
        end = (centre + support + 0.5).floor()
        weights = _FILTERS[self.steps.interpolation]((index - centre + 0.5) * (1 / widened))
        weights = torch.where((index >= first) & (index < end), weights, 0.0)
        weights = weights / weights.sum(dim=1, keepdim=True)
        if not self._rounds_as_pillow:
            return weights
        scaled = weights * 2**_PILLOW_BITS
        return torch.where(scaled < 0, (scaled - 0.5).ceil(), (scaled + 0.5).floor())

    def _tensorflow_weights(self, wanted: Tensor, index: Tensor, length: Tensor, resized: Tensor) -> Tensor:
        """Return [output, input] weights as `_resize_tensorflow` has them: the filter is not widened."""
        scale = length / resized
        if self.steps.interpolation == "area":
            begin, end = (wanted * scale)[:, None], ((wanted + 1) * scale)[:, None]
            return (torch.minimum(end, index + 1) - torch.maximum(begin, index)).clamp(min=0) * (resized / length)
        if self.steps.interpolation == "bilinear":  # TensorFlow computes centres in float32
            centre = (wanted.float() + 0.5) * (length.float() / resized.float()) - 0.5
            centre = torch.minimum(centre.clamp(min=0), (length - 1).float())[:, None]
            return (1 - (index.float() - centre).abs()).clamp(min=0).double()
        weights = _FILTERS[self.steps.interpolation](index - ((wanted + 0.5) * scale - 0.5)[:, None])
        return (weights / weights.sum(dim=1, keepdim=True)).float().double()

    def _product(self, pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Resize along one axis, round as the library does in between, then along the other."""
        if self._rounds_as_pillow:
            return _pillow_integers(rows @ _pillow_integers(pixels @ columns.T)).float()
        if self.steps.antialias:  # Pillow begins with columns, TensorFlow's area with rows
            found = (rows @ (pixels @ columns.T).float().double()).float()
        else:
            found = ((rows @ pixels).float().double() @ columns.T).float()
        if self.steps.rounding == "none":
            return found
        return (found.round() if self.steps.rounding == "nearest" else (found + 1e-4).floor()).clamp(0, 255)

    def _padded(self, pixels: Tensor, wanted: list[Tensor], resized: Pair) -> Tensor:
        rows, columns = ((wanted[axis] >= 0) & (wanted[axis] < resized[axis]) for axis in (0, 1))
        mean = torch.tensor(self.steps.mean, dtype=torch.float32, device=pixels.device) * self.steps.max_value
        return torch.where(rows[:, None] & columns, pixels, mean[:, None, None])

    @property
    def _rounds_as_pillow(self) -> bool:
        return self.steps.antialias and self.steps.rounding == "nearest"


def _constants(like: Tensor, *values: float) -> Pair:
    rows, columns = (torch.tensor(float(value), dtype=torch.float64, device=like.device) for value in values)
    return rows, columns


def _pillow_integers(sums: Tensor) -> Tensor:
    """Round sums of 8-bit pixels times integer weights; float64 holds them exactly."""
    return (sums * 2.0**-_PILLOW_BITS + 0.5).floor().clamp(0, 255)


def _box(x: Tensor) -> Tensor:
    return ((x > -0.5) & (x <= 0.5)).double()


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _cubic(x: Tensor) -> Tensor:
    """Keys' filter with a = -1/2; ONNX and torch have -3/4."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: Tensor) -> Tensor:
    angle = torch.where(x == 0, 1.0, x * math.pi)
    return torch.where(x == 0, 1.0, angle.sin() / angle)


_FILTERS: dict[str, Callable[[Tensor], Tensor]] = {"area": _box, "bilinear": _triangle, "bicubic": _cubic, "lanczos": _lanczos}
