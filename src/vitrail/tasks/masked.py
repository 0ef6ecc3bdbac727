"""Learning from images alone: patches are hidden, and what they held is the target.

A falling loss proves nothing here: where every target is the same, the loss falls to zero and the model has learned only that. So
every loss is shown next to that of the best constant prediction, and targets that hardly differ stop the run before it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.models.masked import at
from vitrail.tasks.base import Sums, Task
from vitrail.tasks.patch_targets import Colours, PatchTarget, entropy

Kind = Literal["masked-patch", "masked-autoencoder"]
_FEWEST_BINS, _LEAST_BITS, _LEAST_LOSS = 5, 0.1, 1e-5
_PATTERNS = 1009  # different noises of a validation split; image i has that of i modulo this prime


@dataclass(frozen=True)
class Baseline:
    """The targets of some training images, and the loss of the best constant prediction."""

    images: int
    bins: int
    """Colours that occur, of `possible`."""
    possible: int
    entropy: float
    """Of the colours, in bits."""
    loss: float
    """Of the best constant prediction."""

    def check(self, preprocessing: str) -> None:
        """Refuse targets that are all the same."""
        if self.bins >= _FEWEST_BINS and self.entropy >= _LEAST_BITS and self.loss >= _LEAST_LOSS:
            return
        raise VitrailError(
            f"All targets fall in {self.bins} of {self.possible} bins (entropy {self.entropy:.2f} bits over {self.images} images), "
            "so there is nothing to predict and the loss would fall to zero all the same: the images look un-normalised or already "
            f"standardised. Expected are pixels that fill 0 to 1 when {preprocessing} is undone: look at the images with "
            "`vitrail data check`, and check --data.preprocess."
        )

    def describe(self, unit: str) -> str:
        return (
            f"targets: {self.bins} of {self.possible} colours in {self.images} training images, entropy {self.entropy:.2f} bits; "
            f"the best constant prediction costs {self.loss:.4g} {unit}, and the loss is shown relative to that"
        )


@dataclass(frozen=True)
class MaskedPrediction:
    """Predictions of a batch, and their targets."""

    predicted: Tensor
    targets: Tensor
    bins: Tensor
    """Colours of the hidden patches, whatever is predicted."""


class Masked(Task):
    """Predict a target of hidden patches. The loss of an image is the mean over its hidden patches.

    Which patches are hidden is drawn from torch's generator of the device, which the loop seeds for every micro-batch. Validation
    hides the same patches every time.
    """

    outputs = 0  # the encoder has no head: nothing is classified
    headline = "relative_loss"

    def __init__(
        self, kind: Kind, target: PatchTarget, *, patches: int, draws: int, settings: dict[str, Any] | None = None
    ) -> None:
        self.kind, self.target, self.settings = kind, target, settings or {}
        self.baseline: Baseline | None = None
        fixed = torch.Generator().manual_seed(0)
        self._fixed = torch.rand(_PATTERNS, patches, draws, generator=fixed)

    @property
    def unit(self) -> str:
        return "nats" if isinstance(self.target, Colours) else "(squared error)"

    def objective(self, run: Callable[..., Any], images: Tensor, targets: Tensor) -> Tensor:
        predicted, masked = run(images, self.draw(images))
        with torch.no_grad():
            patch_targets = at(self.target.of(images), masked)
        return self.loss(predicted, patch_targets)

    def draw(self, images: Tensor) -> Tensor:
        """Return noise for a batch, by the generator of its device."""
        return torch.rand(len(images), *self._fixed.shape[1:], device=images.device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.target.loss(outputs, targets)

    def predict(self, run: Callable[..., Any], images: Tensor, indices: Tensor) -> MaskedPrediction:
        predicted, masked = run(images, self._fixed[indices % _PATTERNS].to(images.device))
        patch_targets = at(self.target.of(images), masked)
        same = isinstance(self.target, Colours)
        return MaskedPrediction(predicted.float(), patch_targets, patch_targets if same else at(self.target.bins(images), masked))

    def train_metrics(self, loss: float) -> dict[str, float]:
        if self.baseline is None:
            return {}
        known = {"constant_loss": self.baseline.loss, "target_entropy": self.baseline.entropy}
        return {"relative_loss": loss / self.baseline.loss, **known}

    def meter(self) -> MaskedMeter:
        return MaskedMeter(self.target)

    def to(self, device: Any) -> Task:
        self.target.to(device)
        return self

    def metric_names(self) -> tuple[str, ...]:
        return ("relative_loss", *(("patch_accuracy",) if isinstance(self.target, Colours) else ()), "loss")

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.settings}


class MaskedMeter(Sums):
    """The mean loss, that of the best constant prediction of these very targets, and one divided by the other."""

    def __init__(self, target: PatchTarget) -> None:
        super().__init__()
        self.target = target

    def update(self, outputs: MaskedPrediction, targets: Tensor | None = None) -> None:
        losses = self.target.loss(outputs.predicted, outputs.targets)
        self.gather(count=len(losses), loss=float(losses.double().sum()), bins=self.target.histogram(outputs.bins))
        self.gather(**{f"target_{name}": value for name, value in self.target.tally(outputs.targets).items()})
        if isinstance(self.target, Colours):
            hits = self.target.logits(outputs.predicted).argmax(-1) == outputs.targets
            self.gather(correct=int(hits.sum()), predicted=hits.numel())

    def metrics(self) -> dict[str, float]:
        sums, known = self.sums, self.baseline()
        loss = float(sums["loss"]) / int(sums["count"])
        metrics = {
            "loss": loss,
            "relative_loss": loss / max(known.loss, 1e-12),
            "constant_loss": known.loss,
            "target_entropy": known.entropy,
            "images": float(sums["count"]),
        }
        if "correct" in sums:
            metrics["patch_accuracy"] = float(sums["correct"]) / float(sums["predicted"])
        return metrics

    def baseline(self) -> Baseline:
        tally = {name.removeprefix("target_"): value for name, value in self.sums.items() if name.startswith("target_")}
        return baseline_of(self.target, int(self.sums["count"]), self.sums["bins"], tally)


def baseline_of(target: PatchTarget, images: int, bins: Any, tally: dict[str, Any]) -> Baseline:
    """Return the baseline that follows from a histogram of colours and the sums of targets."""
    occurring = int((bins.sum(axis=0) > 0).sum())
    return Baseline(images, occurring, target.classes, entropy(bins) / math.log(2), target.constant_loss(tally))


def compute_baseline(target: PatchTarget, batches: Iterable[Tensor]) -> Baseline:
    """Return the baseline of all patches of these images, as training sees them."""
    images, sums = 0, dict[str, Any]()
    for batch in batches:
        images += len(batch)
        tallies = {"bins": target.histogram(target.bins(batch)), **target.tally(target.of(batch))}
        sums = {name: sums.get(name, 0) + value for name, value in tallies.items()}
    return baseline_of(target, images, sums["bins"], sums)
