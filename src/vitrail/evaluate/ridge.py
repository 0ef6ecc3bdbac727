"""Ridge regression on frozen features in closed form: the paper's few-shot classifier (§4.1, fig. 4).

Features are standardised by the support set alone and get one more, a constant. Each class is a target of +1 for its images
and −1 for all others. The weights that solve this least-squares problem follow from one linear system, so there is no
optimiser to tune and none to blame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.errors import VitrailError

Rows = Tensor | npt.NDArray[np.floating]
Labels = Tensor | npt.NDArray[np.integer]

L2 = 2.0**10
BIAS = 100.0
_STD_FLOOR = 1e-5  # added to the standard deviation, as the reference does
_CHUNK = 4096  # rows widened to float64 at a time


@dataclass(frozen=True)
class Ridge:
    """A fitted classifier: how features are standardised, and the weights [features + 1, classes], all in float64."""

    mean: Tensor
    std: Tensor
    weights: Tensor
    bias: float

    def scores(self, x: Rows) -> Tensor:
        """Float64 scores [images, classes]; the largest is the prediction."""
        x = _features(x, "test")
        if x.shape[1] != len(self.mean):
            raise VitrailError(
                f"The test features have {x.shape[1]} numbers an image, the support features {len(self.mean)}. "
                "Compute both with the same model, layer and pooling."
            )
        scores = torch.empty(len(x), self.weights.shape[1], dtype=torch.float64, device=x.device)
        for rows, part in _widened(x):
            torch.mm((part - self.mean) / self.std, self.weights[:-1], out=scores[rows])
            scores[rows] += self.bias * self.weights[-1]
        return scores

    def predict(self, x: Rows) -> Tensor:
        """Class numbers [images], without holding the scores of all images at once."""
        x = _features(x, "test")
        return torch.cat([self.scores(part).argmax(1) for part in x.split(_CHUNK)]) if len(x) else torch.empty(0, dtype=torch.long)


def ridge_scores(x: Rows, y: Labels, x_test: Rows, classes: int, l2: float = L2, bias: float = BIAS) -> Tensor:
    """Scores [test images, classes] of the closed form fitted on features `x` [images, features] with class numbers `y`."""
    return fit_ridge(x, y, classes, l2=l2, bias=bias).scores(x_test)


def fit_ridge(x: Rows, y: Labels, classes: int, *, l2: float = L2, bias: float = BIAS) -> Ridge:
    """Solve for the weights: (XᵀX + λI)⁻¹XᵀY with at least as many images as features, else Xᵀ(XXᵀ + λI)⁻¹Y.

    Both are the same in exact arithmetic; the choice keeps the system small. Sums and the solution are float64 whatever the
    features are: with the constant of 100 the system's condition number exceeds what float32 can carry.
    """
    x = _features(x, "support")
    y = _labels(y, len(x), classes).to(x.device)
    if not l2 > 0:
        raise VitrailError(f"l2 is {l2:g}; the closed form needs a value above 0 (the paper's code uses {L2:g}).")
    mean, std = _moments(x)
    if len(x) >= x.shape[1] + 1:
        weights = _primal(x, y, classes, l2, bias, mean, std)
    else:
        weights = _kernel(x, y, classes, l2, bias, mean, std)
    return Ridge(mean, std, weights, bias)


def _primal(x: Tensor, y: Tensor, classes: int, l2: float, bias: float, mean: Tensor, std: Tensor) -> Tensor:
    width = x.shape[1] + 1
    gram = torch.zeros(width, width, dtype=torch.float64, device=x.device)
    sums = torch.zeros(classes, width, dtype=torch.float64, device=x.device)  # of the rows of each class
    for rows, part in _widened(x):
        standard = _with_constant((part - mean) / std, bias)
        gram.addmm_(standard.T, standard)
        sums.index_add_(0, y[rows], standard)
    # With Y = 2·onehot − 1, XᵀY needs no [images, classes] matrix: twice a class's sum, less the sum of all.
    right = (2 * sums - sums.sum(0)).T
    return _solve(gram, right, l2)


def _kernel(x: Tensor, y: Tensor, classes: int, l2: float, bias: float, mean: Tensor, std: Tensor) -> Tensor:
    standard = _with_constant((x.double() - mean) / std, bias)
    targets = torch.full((len(x), classes), -1.0, dtype=torch.float64, device=x.device)
    targets[torch.arange(len(x), device=x.device), y] = 1.0
    return standard.T @ _solve(standard @ standard.T, targets, l2)


def _solve(system: Tensor, right: Tensor, l2: float) -> Tensor:
    system.diagonal().add_(l2)
    return torch.cholesky_solve(right, torch.linalg.cholesky(system))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature, by two passes in float64."""
    mean = sum((part.sum(0) for _, part in _widened(x)), torch.zeros((), dtype=torch.float64)) / len(x)
    squares = sum(((part - mean).square().sum(0) for _, part in _widened(x)), torch.zeros((), dtype=torch.float64))
    return mean, (squares / len(x)).sqrt() + _STD_FLOOR


def _widened(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(x), _CHUNK):
        rows = slice(start, min(start + _CHUNK, len(x)))
        yield rows, x[rows].double()


def _with_constant(x: Tensor, bias: float) -> Tensor:
    return torch.cat([x, x.new_full((len(x), 1), bias)], dim=1)


def _features(x: Rows, which: str) -> Tensor:
    x = torch.as_tensor(x)
    if x.ndim != 2:
        raise VitrailError(f"The {which} features are {list(x.shape)}; one row an image is expected, [images, features].")
    if which == "support" and len(x) == 0:
        raise VitrailError("The support set is empty: a few-shot classifier needs at least one image.")
    if x.device.type == "mps":  # it has no float64
        x = x.cpu()
    bad = [start + int(row) for start, part in _parts(x) for row in torch.nonzero(~part.isfinite().all(1))[:, 0]]
    if bad:
        raise VitrailError(
            f"{len(bad)} of {len(x)} rows of the {which} features hold NaN or infinity (the first is row {bad[0]}). "
            "Look at these images and at the model's weights; float16 overflows where bfloat16 or float32 do not."
        )
    return x


def _parts(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    return ((start, x[start : start + _CHUNK]) for start in range(0, len(x), _CHUNK))


def _labels(y: Labels, images: int, classes: int) -> Tensor:
    y = torch.as_tensor(y)
    if y.shape != (images,) or y.is_floating_point():
        raise VitrailError(f"The labels are {list(y.shape)} of {y.dtype}; a class number for each of {images} images is expected.")
    outside = torch.nonzero((y < 0) | (y >= classes))[:, 0]
    if len(outside):
        row = int(outside[0])
        raise VitrailError(f"Label {int(y[row])} in row {row}, but there are {classes} classes (0 to {classes - 1}).")
    return y.long()
