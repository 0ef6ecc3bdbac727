"""Probes: what a simple classifier can read from frozen features, with every choice that decides the score said and saved.

A linear probe is a logistic regression fitted by L-BFGS to its minimum, so that no learning rate or schedule is part of the
result. Its regularisation, or the number of neighbours of the other probe, is chosen on a held-out part of the training
images; the test images are looked at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.split import stratified
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.evaluate.features import FeatureSpec, extract
from vitrail.evaluate.fewshot import support_and_test
from vitrail.evaluate.intervals import Interval, wilson
from vitrail.evaluate.measuring import bundle_preprocess
from vitrail.evaluate.running import Running, on_own_device

Array = npt.NDArray[Any]
_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """How the probe is fitted."""

    method: Literal["logistic", "knn"] = "logistic"
    """logistic: multinomial logistic regression. knn: a vote of the nearest training images by cosine similarity."""
    standardise: bool = True
    """logistic: bring every feature to mean 0 and deviation 1 over the training images."""
    l2: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """logistic: penalties λ to choose from; the loss is the mean cross-entropy + λ/2·|W|². The bias is not penalised."""
    iterations: int = 500
    """logistic: L-BFGS stops here if the gradient has not vanished before."""
    neighbours: tuple[int, ...] = (1, 5, 10, 20, 50, 100)
    """knn: how many neighbours vote, to choose from."""
    temperature: float = 0.07
    """knn: a neighbour's vote weighs exp(similarity / temperature)."""
    holdout: float = 0.1
    """Share of the training images on which l2 or neighbours is chosen; the probe is then fitted again on all of them."""
    seed: int = 0
    """Decides what is held out."""

    def __post_init__(self) -> None:
        choices = self.l2 if self.method == "logistic" else self.neighbours
        if not choices or min(choices) <= 0:
            raise VitrailError(f"A {self.method} probe needs values above 0 to choose from; it has {list(choices)}.")
        if not 0 < self.holdout < 1 and len(choices) > 1:
            raise VitrailError(
                f"holdout is {self.holdout:g}; to choose among {len(choices)} values it is a share above 0 and below 1."
            )


@dataclass(frozen=True)
class Probed:
    """A probe's score and all that decided it."""

    accuracy: float
    interval: Interval
    images: int
    chosen: float  # the l2 or the number of neighbours
    validation: dict[float, float]  # accuracy on the held-out part for each value tried; empty where there was one only
    spec: ProbeSpec
    features: FeatureSpec
    preprocess: Preprocess
    train_images: int
    bad: tuple[BadImage, ...] = ()

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
        }


def probe(
    bundle: Bundle,
    data: str,
    *,
    train: str = "train",
    test: str | None = None,
    spec: ProbeSpec | None = None,
    features: FeatureSpec | None = None,
    running: Running | None = None,
) -> Probed:
    """Fit a probe on the features of one split and measure it on another (val, or else test)."""
    running = running or on_own_device(bundle.model)
    learn, held = support_and_test(data, train, test, running)
    return probe_splits(bundle, learn, held, spec or ProbeSpec(), features or FeatureSpec(), running)


def probe_splits(bundle: Bundle, learn: Split, held: Split, spec: ProbeSpec, features: FeatureSpec, running: Running) -> Probed:
    if features.what == "patches":
        raise VitrailError("A probe needs one vector an image; take mean instead of patches.")
    preprocess = bundle_preprocess(bundle)
    known = extract(bundle.model, learn, preprocess, features, running)
    asked = extract(bundle.model, held, preprocess, features, running)
    device = running.world.device if running.world.device.type == "cuda" else torch.device("cpu")
    x, x_test = (torch.from_numpy(_finite(one.features)).to(device) for one in (known, asked))
    y = torch.from_numpy(learn.targets[known.indices]).to(device)
    y_test = torch.from_numpy(held.targets[asked.indices]).to(device)
    classes = len(learn.classes)
    out = stratified(learn.subset(known.indices), spec.holdout, seed=spec.seed)
    chosen, validation = choose(x, y, classes, spec, out)
    accuracy, _ = next(_accuracies(x, y, x_test, y_test, classes, spec, (chosen,)))
    right = round(accuracy * len(y_test))
    bad = (*known.bad, *asked.bad)
    return Probed(accuracy, wilson(right, len(y_test)), len(y_test), chosen, validation, spec, features, preprocess, len(y), bad)


def choose(x: Tensor, y: Tensor, classes: int, spec: ProbeSpec, held_out: Array) -> tuple[float, dict[float, float]]:
    """The value that is best on the held-out rows when fitted on the others, and the accuracy there for each."""
    values = spec.l2 if spec.method == "logistic" else tuple(map(float, spec.neighbours))
    if len(values) == 1:
        return values[0], {}
    out = torch.from_numpy(held_out).to(y.device)
    inside = torch.ones(len(y), dtype=torch.bool, device=y.device)
    inside[out] = False
    if not len(out) or len(torch.unique(y[inside])) < 2:
        raise VitrailError(f"{len(y)} training images are too few to hold some out. Give one value to choose nothing.")
    found = {value: score for score, value in _accuracies(x[inside], y[inside], x[out], y[out], classes, spec, values)}
    return max(found, key=lambda value: found[value]), found


def _accuracies(
    x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, classes: int, spec: ProbeSpec, values: tuple[float, ...]
) -> Iterator[tuple[float, float]]:
    """(accuracy, value) for each value."""
    if spec.method == "knn":
        for value in values:
            yield float((knn(x, y, x_test, classes, int(value), spec.temperature) == y_test).double().mean()), value
        return
    mean, std = (x.mean(0), x.std(0, correction=0) + 1e-5) if spec.standardise else (torch.zeros_like(x[0]), torch.ones_like(x[0]))
    x, x_test = (x - mean) / std, (x_test - mean) / std
    fitted = None
    for value in sorted(values, reverse=True):  # from strong to weak, each starting where the last one ended
        fitted = fit_logistic(x, y, classes, value, iterations=spec.iterations, start=fitted)
        yield float(((x_test @ fitted[:-1] + fitted[-1]).argmax(1) == y_test).double().mean()), value


def fit_logistic(x: Tensor, y: Tensor, classes: int, l2: float, *, iterations: int = 500, start: Tensor | None = None) -> Tensor:
    """Weights [features + 1, classes] (the bias is last) that minimise mean cross-entropy + l2/2·|W|²."""
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
    """Class numbers by a weighted vote of the nearest rows of `x` by cosine similarity."""
    x, x_test = F.normalize(x, dim=1), F.normalize(x_test, dim=1)
    answers = []
    for part in x_test.split(_CHUNK):
        near = (part @ x.T).topk(min(neighbours, len(x)), dim=1)
        votes = torch.zeros(len(part), classes, dtype=x.dtype, device=x.device)
        votes.scatter_add_(1, y[near.indices], ((near.values - 1) / temperature).exp())
        answers.append(votes.argmax(1))
    return torch.cat(answers)


def _finite(features: Array) -> Array:
    bad = np.flatnonzero(~np.isfinite(features).all(1))
    if len(bad):
        raise VitrailError(
            f"{len(bad)} of {len(features)} images have features with NaN or infinity (the first is number {bad[0]})."
        )
    return features
