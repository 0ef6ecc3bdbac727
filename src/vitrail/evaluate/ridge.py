"""Ridge regression on frozen features in closed form: the paper's few-shot classifier (§4.1, fig. 4).

Features are standardised with the statistics of the support set, and a constant feature is appended. The target of a class is
+1 for its images and −1 for all others. The weights are the solution of one linear system, so there is no optimiser to tune.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.errors import VitrailError, counted
from vitrail.evaluate.settings import BIAS, L2
from vitrail.tasks.ranking import ranked

Rows = Tensor | npt.NDArray[np.floating]
Labels = Tensor | npt.NDArray[np.integer]

_STD_EPS = 1e-5  # added to the standard deviation, as in the reference code
_CHUNK = 4096  # rows converted to float64 at a time


@dataclass(frozen=True)
class RidgeClassifier:
    """A fitted classifier: mean and std of the features, and the weights [features + 1, classes], all in float64."""

    mean: Tensor
    std: Tensor
    weights: Tensor
    bias: float

    def scores(self, x: Rows) -> Tensor:
        """Compute float64 scores [images, classes]; the largest is the prediction."""
        x = _features(x, "test")
        if x.shape[1] != len(self.mean):
            raise VitrailError(
                f"The test features have {x.shape[1]} channels, the support features {len(self.mean)}. "
                "Compute both with the same model, layer and pooling."
            )
        scores = torch.empty(len(x), self.weights.shape[1], dtype=torch.float64, device=x.device)
        for rows, part in _float64_chunks(x):
            torch.mm((part - self.mean) / self.std, self.weights[:-1], out=scores[rows])
            scores[rows] += self.bias * self.weights[-1]
        return scores

    def accuracy(self, x: Rows, y: Labels) -> float:
        """Compute the share of images whose class has the highest score, without holding the scores of all in memory.

        Equal scores count as misses, as in `vitrail eval`.
        """
        x = _features(x, "test")
        y = _labels(y, len(x), self.weights.shape[1]).to(x.device)
        parts = zip(x.split(_CHUNK), y.split(_CHUNK), strict=True)
        hits = sum(int((ranked(self.scores(part), targets)[0] == 0).sum()) for part, targets in parts)
        return hits / len(x) if len(x) else float("nan")


def ridge_scores(x: Rows, y: Labels, x_test: Rows, classes: int, l2: float = L2, bias: float = BIAS) -> Tensor:
    """Fit on features `x` [images, features] with class indices `y`, and return the scores [test images, classes]."""
    return fit_ridge(x, y, classes, l2=l2, bias=bias).scores(x_test)


def fit_ridge(x: Rows, y: Labels, classes: int, *, l2: float = L2, bias: float = BIAS) -> RidgeClassifier:
    """Solve for the weights: (XᵀX + λI)⁻¹XᵀY with at least as many images as features, else Xᵀ(XXᵀ + λI)⁻¹Y.

    Both are equal in exact arithmetic; the choice keeps the system small. Everything is computed in float64, whatever the
    dtype of the features: with a constant of 100 the system is too ill-conditioned for float32.
    """
    x = _features(x, "support")
    y = _labels(y, len(x), classes).to(x.device)
    if not l2 > 0:
        raise VitrailError(f"l2 is {l2:g}; it must be above 0 (the paper's code uses {L2:g}).")
    mean, std = _mean_and_std(x)
    if len(x) >= x.shape[1] + 1:
        weights = _primal(x, y, classes, l2, bias, mean, std)
    else:
        weights = _kernel(x, y, classes, l2, bias, mean, std)
    return RidgeClassifier(mean, std, weights, bias)


def _primal(x: Tensor, y: Tensor, classes: int, l2: float, bias: float, mean: Tensor, std: Tensor) -> Tensor:
    width = x.shape[1] + 1
    gram = torch.zeros(width, width, dtype=torch.float64, device=x.device)
    class_sums = torch.zeros(classes, width, dtype=torch.float64, device=x.device)
    for rows, part in _float64_chunks(x):
        standard = _with_constant((part - mean) / std, bias)
        gram.addmm_(standard.T, standard)
        class_sums.index_add_(0, y[rows], standard)
    # Y = 2·onehot − 1, so XᵀY needs no [images, classes] matrix: it is twice the sum of each class minus the sum of all rows.
    x_t_y = (2 * class_sums - class_sums.sum(0)).T
    return _solve(gram, x_t_y, l2)


def _kernel(x: Tensor, y: Tensor, classes: int, l2: float, bias: float, mean: Tensor, std: Tensor) -> Tensor:
    standard = _with_constant((x.double() - mean) / std, bias)
    targets = torch.full((len(x), classes), -1.0, dtype=torch.float64, device=x.device)
    targets[torch.arange(len(x), device=x.device), y] = 1.0
    return standard.T @ _solve(standard @ standard.T, targets, l2)


def _solve(gram: Tensor, rhs: Tensor, l2: float) -> Tensor:
    gram.diagonal().add_(l2)
    return torch.cholesky_solve(rhs, torch.linalg.cholesky(gram))


def _mean_and_std(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation of each feature, in two passes in float64."""
    mean = sum((part.sum(0) for _, part in _float64_chunks(x)), torch.zeros((), dtype=torch.float64)) / len(x)
    squares = sum(((part - mean).square().sum(0) for _, part in _float64_chunks(x)), torch.zeros((), dtype=torch.float64))
    return mean, (squares / len(x)).sqrt() + _STD_EPS


def _float64_chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(x), _CHUNK):
        rows = slice(start, min(start + _CHUNK, len(x)))
        yield rows, x[rows].double()


def _with_constant(x: Tensor, bias: float) -> Tensor:
    return torch.cat([x, x.new_full((len(x), 1), bias)], dim=1)


def _features(x: Rows, which: str) -> Tensor:
    x = torch.as_tensor(x)
    if x.ndim != 2:
        raise VitrailError(f"The {which} features have the shape {list(x.shape)}; expected [images, features].")
    if which == "support" and len(x) == 0:
        raise VitrailError("The support set is empty; a few-shot classifier needs at least one image.")
    if x.device.type == "mps":  # it has no float64
        x = x.cpu()
    bad = [start + int(row) for start, part in _chunks(x) for row in torch.nonzero(~part.isfinite().all(1))[:, 0]]
    if bad:
        raise VitrailError(
            f"NaN or infinity in {len(bad)} of {counted(len(x), 'row')} of the {which} features (the first is row {bad[0]}). "
            "Check these images and the model's weights. If the model runs in float16, use bfloat16 or float32."
        )
    return x


def _chunks(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    return ((start, x[start : start + _CHUNK]) for start in range(0, len(x), _CHUNK))


def _labels(y: Labels, images: int, classes: int) -> Tensor:
    y = torch.as_tensor(y)
    if y.shape != (images,) or y.is_floating_point():
        raise VitrailError(f"The labels are {y.dtype} of shape {list(y.shape)}; expected integers of shape [{images}].")
    outside = torch.nonzero((y < 0) | (y >= classes))[:, 0]
    if len(outside):
        row = int(outside[0])
        raise VitrailError(f"Label {int(y[row])} in row {row} is out of range; the classes are 0 to {classes - 1}.")
    return y.long()
