"""Probe frozen features with a linear or a k-nearest-neighbours classifier.

The linear probe is a logistic regression fitted to convergence with L-BFGS, so the result does not depend on a learning rate
or schedule. The L2 penalty, or k, is chosen on a held-out part of the training images; the test images are used once. Every
setting is saved with the score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.split import stratified
from vitrail.data.trained_on import Overlap
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.context import EvalContext, default_context
from vitrail.evaluate.features import extract_features
from vitrail.evaluate.fewshot import open_train_and_test
from vitrail.evaluate.settings import FeatureSpec, ProbeSpec
from vitrail.tasks.ranking import ranked
from vitrail.wilson import Interval, wilson

Array = npt.NDArray[Any]
_CHUNK = 4096


@dataclass(frozen=True)
class ProbeResult:
    """A probe's test accuracy and all settings behind it."""

    accuracy: float
    interval: Interval
    images: int
    chosen: float  # the l2 or the number of neighbours
    validation: dict[float, float]  # candidate → accuracy on the held-out images; empty with one candidate
    spec: ProbeSpec
    features: FeatureSpec
    preprocess: Preprocess
    train_images: int
    bad: tuple[BadImage, ...] = ()
    trained_on: Overlap | None = None
    """Which of the test images the checkpoint was trained on."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "interval_95": list(self.interval),
            "images": self.images,
            "train_images": self.train_images,
            "chosen": self.chosen,
            "validation": {f"{value:g}": score for value, score in self.validation.items()},
            "probe": dataclasses.asdict(self.spec),
            "features": self.features.to_dict(),
            "preprocess": self.preprocess.to_dict(),
            "bad_images": [one.name for one in self.bad],
            "trained_on": self.trained_on.to_dict() if self.trained_on is not None else None,
            "warnings": list(self.trained_on.notes) if self.trained_on is not None else [],
        }


def probe(
    bundle: Bundle,
    data: str,
    *,
    train_split: str = "train",
    split: str | None = None,
    spec: ProbeSpec | None = None,
    features: FeatureSpec | None = None,
    context: EvalContext | None = None,
) -> ProbeResult:
    """Fit a probe on the features of `train_split` and test it on `split`; default: val, or test if there is no val."""
    context = context or default_context(bundle.model)
    train, test, trained_on = open_train_and_test(bundle, data, train_split, split, context)
    result = probe_splits(bundle, train, test, spec or ProbeSpec(), features or FeatureSpec(), context)
    return dataclasses.replace(result, trained_on=trained_on)


def probe_splits(
    bundle: Bundle, train: Split, test: Split, spec: ProbeSpec, features: FeatureSpec, context: EvalContext
) -> ProbeResult:
    """Fit a probe on the features of `train` and test it on `test`."""
    if features.feature == "patches":
        raise VitrailError("A probe needs one vector per image; use mean instead of patches.")
    preprocess = context.preprocess_for(bundle.stored_preprocess(), bundle.model)
    train_features = extract_features(bundle.model, train, preprocess, features, context)
    test_features = extract_features(bundle.model, test, preprocess, features, context)
    device = context.world.device if context.world.device.type == "cuda" else torch.device("cpu")
    x, x_test = (torch.from_numpy(_finite(one.features)).to(device) for one in (train_features, test_features))
    y = torch.from_numpy(train.targets[train_features.indices]).to(device)
    y_test = torch.from_numpy(test.targets[test_features.indices]).to(device)
    classes = len(train.classes)
    held_out = stratified(train.subset(train_features.indices), spec.holdout, seed=spec.seed)
    chosen, validation = choose(x, y, classes, spec, held_out)
    accuracy, _ = next(_accuracies(x, y, x_test, y_test, classes, spec, (chosen,)))
    interval = wilson(round(accuracy * len(y_test)), len(y_test))
    bad = (*train_features.bad, *test_features.bad)
    return ProbeResult(accuracy, interval, len(y_test), chosen, validation, spec, features, preprocess, len(y), bad)


def choose(x: Tensor, y: Tensor, classes: int, spec: ProbeSpec, held_out: Array) -> tuple[float, dict[float, float]]:
    """Choose the candidate with the best held-out accuracy. Returns it and the accuracy of every candidate."""
    candidates = spec.l2 if spec.method == "logistic" else tuple(map(float, spec.neighbours))
    if len(candidates) == 1:
        return candidates[0], {}
    out = torch.from_numpy(held_out).to(y.device)
    kept = torch.ones(len(y), dtype=torch.bool, device=y.device)
    kept[out] = False
    if not len(out) or len(torch.unique(y[kept])) < 2:
        raise VitrailError(
            f"{counted(len(y), 'training image')}: too few to hold some out. Pass a single value of l2 or neighbours."
        )
    accuracies = {value: score for score, value in _accuracies(x[kept], y[kept], x[out], y[out], classes, spec, candidates)}
    return max(accuracies, key=lambda value: accuracies[value]), accuracies


def _accuracies(
    x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, classes: int, spec: ProbeSpec, values: tuple[float, ...]
) -> Iterator[tuple[float, float]]:
    """Yield (accuracy, value) for each candidate value."""
    if spec.method == "knn":
        for value in values:
            yield _accuracy(knn(x, y, x_test, classes, int(value), spec.temperature), y_test), value
        return
    mean, std = (x.mean(0), x.std(0, correction=0) + 1e-5) if spec.standardise else (torch.zeros_like(x[0]), torch.ones_like(x[0]))
    x, x_test = (x - mean) / std, (x_test - mean) / std
    fitted = None
    for value in sorted(values, reverse=True):  # from strong to weak; each fit starts from the previous solution
        fitted = fit_logistic(x, y, classes, value, iterations=spec.iterations, start=fitted)
        yield _accuracy(x_test @ fitted[:-1] + fitted[-1], y_test), value


def _accuracy(scores: Tensor, targets: Tensor) -> float:
    return float((ranked(scores, targets)[0] == 0).double().mean())


def fit_logistic(x: Tensor, y: Tensor, classes: int, l2: float, *, iterations: int = 500, start: Tensor | None = None) -> Tensor:
    """Minimise mean cross-entropy + l2/2·|W|². Returns the weights [features + 1, classes]; the last row is the bias."""
    width = x.shape[1] + 1
    weights = torch.zeros(width, classes, dtype=x.dtype, device=x.device) if start is None else start.clone()
    weights.requires_grad_(True)
    solver = torch.optim.LBFGS(
        [weights], max_iter=iterations, history_size=10, tolerance_grad=1e-6, tolerance_change=1e-10, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        solver.zero_grad()
        value = F.cross_entropy(x @ weights[:-1] + weights[-1], y) + 0.5 * l2 * weights[:-1].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)
    return weights.detach()


def knn(x: Tensor, y: Tensor, x_test: Tensor, classes: int, neighbours: int, temperature: float) -> Tensor:
    """Return the votes [test rows, classes] of the nearest rows of `x` by cosine similarity."""
    x, x_test = F.normalize(x, dim=1), F.normalize(x_test, dim=1)
    parts = []
    for part in x_test.split(_CHUNK):
        near = (part @ x.T).topk(min(neighbours, len(x)), dim=1)
        votes = torch.zeros(len(part), classes, dtype=x.dtype, device=x.device)
        votes.scatter_add_(1, y[near.indices], ((near.values - 1) / temperature).exp())
        parts.append(votes)
    return torch.cat(parts)


def _finite(features: Array) -> Array:
    bad = np.flatnonzero(~np.isfinite(features).all(1))
    if len(bad):
        raise VitrailError(
            f"The features of {len(bad)} of {len(features)} images contain NaN or infinity (the first is image {bad[0]}). "
            "Check these images and the weights (`vitrail info`). If they are finite, use bf16 or fp32."
        )
    return features
