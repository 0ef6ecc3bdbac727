"""Compare an exported model with the PyTorch model on real images."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.checkpoints import Bundle
from vitrail.data import embedded
from vitrail.data.types import Split
from vitrail.errors import VitrailError, counted
from vitrail.export.artefact import Array, Artefact
from vitrail.export.metadata import differences
from vitrail.models.features import evaluating

BATCH = 8


@dataclass(frozen=True)
class Threshold:
    """What a precision may cost. `error` is relative to the spread of the outputs, `agreement` the share of equal decisions."""

    error: float | None
    agreement: float
    regression: float
    """Instead of both, for predicted values."""


THRESHOLDS = {
    "fp32": Threshold(error=1e-4, agreement=0.99, regression=1e-4),
    "fp16": Threshold(error=1e-2, agreement=0.98, regression=1e-2),
    "bf16": Threshold(error=5e-2, agreement=0.95, regression=5e-2),
    "int8": Threshold(error=None, agreement=0.95, regression=0.1),
}
_MAX_VARIATION_ERROR = 0.3  # of int8: 0.05 to 0.1 is usual, 0.3 to 0.5 was seen of models calibrated with blank images


@dataclass(frozen=True)
class Comparison:
    """The differences between an exported model and the PyTorch model in float32."""

    images: int
    data: str
    max_difference: float
    """Of logits; for a regression, of the output that differs most relative to its spread."""
    spread: float
    """The largest logit minus the smallest, of the PyTorch model; for a regression, the range of that output."""
    agreement: float | None
    """Fraction of equal decisions: of images whose highest logit is the same output's; for several labels, of the labels that
    either model chooses, those that both choose (of all labels, nearly all are rejected), None if neither chooses any."""
    accuracy: float | None = None
    reference_accuracy: float | None = None
    cosine: float | None = None
    """The smallest cosine of the angle between the outputs of both models for an image."""
    task: str = "classify"
    metadata: tuple[str, ...] = ()
    """What the exported file says otherwise than the checkpoint: class names, preprocessing, thresholds and so on."""
    variation_error: float | None = None
    """Where all images have the same top class, or the same labels, so that equal decisions say little: ‖found − expected‖ relative
    to how the logits vary between images, ‖expected − their mean over images‖. A model whose output does not depend on the image
    has 1 or more."""

    def problems(self, precision: str, max_drop: float | None = None) -> list[str]:
        """Say which limits of this precision are missed; `max_drop` is how much accuracy may be lost, where it is known."""
        limit, found = THRESHOLDS[precision], list(self.metadata)
        if not np.isfinite(self.max_difference):
            return [*found, "logits are not finite"]
        error = limit.regression if self.task == "regress" else limit.error
        scale = self.spread if self.task == "regress" else max(self.spread, 1.0)
        if error is not None and self.max_difference > (allowed := error * scale):
            found.append(f"{self._outputs} differ by up to {self.max_difference:.2g}, allowed is {allowed:.2g}")
        if self.agreement is not None and self.agreement < limit.agreement:
            found.append(f"{self._decisions} {self.agreement:.1%}, needed is {limit.agreement:.0%}")
        if self.agreement is None and self.task == "multilabel" and error is None:
            found.append("neither model chooses a label, so nothing is compared: give images that have labels")
        if self.variation_error is not None and error is None and not self.variation_error <= _MAX_VARIATION_ERROR:
            same = "labels" if self.task == "multilabel" else "top class"
            found.append(
                f"all images have the same {same}, and the error of the logits is {self.variation_error:.0%} of what varies "
                f"between images, allowed is {_MAX_VARIATION_ERROR:.0%}: give images of several kinds, or calibrate with others"
            )
        if max_drop is not None and self.accuracy is not None and self.reference_accuracy is not None:
            drop = self.reference_accuracy - self.accuracy
            if drop > max_drop + 1e-9:
                found.append(f"accuracy falls by {drop:.1%}, allowed is {max_drop:.1%} (--max-drop)")
        return found

    @property
    def _outputs(self) -> str:
        return "values" if self.task == "regress" else "logits"

    @property
    def _decisions(self) -> str:
        several = self.task == "multilabel"
        top = "the top class is the same for this share of the images:"
        return "of the labels that either model chooses, both choose" if several else top

    def describe(self) -> str:
        text = (
            f"{counted(self.images, 'image')} of {self.data}: largest difference of {self._outputs} {self.max_difference:.2g} "
            f"(they spread over {self.spread:.3g})"
        )
        if self.cosine is not None:
            text += f", smallest cosine {self.cosine:.5f}"
        if self.agreement is not None:
            several = self.task == "multilabel"
            text += f", {'both choose' if several else 'same top class for'} {self.agreement:.1%}"
            text += " of the labels that either chooses" if several else ""
        elif self.task == "multilabel":
            text += ", no label chosen"
        if self.accuracy is not None and self.reference_accuracy is not None:
            text += f", accuracy {self.accuracy:.1%} (PyTorch {self.reference_accuracy:.1%})"
        return text


def compare(
    bundle: Bundle, artefact: Artefact, images: Sequence[Any], labels: Sequence[int] | None = None, *, data: str = ""
) -> Comparison:
    """Run both models on images, each with its own preprocessing, and compare."""
    if not images:
        raise VitrailError("There is no image to compare the two models on: give one or more.")
    expected: list[Array] = []
    found: list[Array] = []
    for batch in (images[:1], *batched(images[1:])):  # one image alone is what most requests are
        inputs = torch.stack([bundle.stored_preprocess()(image) for image in batch])
        with torch.no_grad(), evaluating(bundle.model):
            expected.append(bundle.model(inputs.to(next(bundle.model.parameters()).device)).float().cpu().numpy())
        found.append(np.asarray(artefact.logits(batch), dtype=np.float32))
    reference, logits = np.concatenate(expected), np.concatenate(found)
    if logits.shape != reference.shape:
        raise VitrailError(
            f"{artefact.path} has {counted(logits.shape[1], 'output')}, but {bundle.report.source} has "
            f"{counted(reference.shape[1], 'output')}: it was exported from another checkpoint. Give that one, or export it again."
        )
    known = None if labels is None else np.asarray(labels)
    top, reference_top = logits.argmax(1), reference.argmax(1)
    difference, spread = _largest(logits, reference, bundle.task)
    return Comparison(
        images=len(images),
        data=data,
        max_difference=difference,
        spread=spread,
        agreement=_agreement(bundle, logits, reference),
        accuracy=None if known is None else float((top == known).mean()),
        reference_accuracy=None if known is None else float((reference_top == known).mean()),
        cosine=_cosine(logits, reference),
        task=bundle.task,
        metadata=tuple(differences(artefact.metadata, bundle)),
        variation_error=_variation_error(logits, reference) if _decides_alike(bundle, reference) else None,
    )


def _largest(found: Array, expected: Array, task: str) -> tuple[float, float]:
    """Return the largest difference and what it is compared with. Values of a regression may have quite different ranges."""
    if task != "regress":
        return float(np.abs(found - expected).max()), float(np.ptp(expected))
    differences = np.abs(found - expected).max(axis=0)
    ranges = np.maximum(np.ptp(expected, axis=0), 1e-3 * np.abs(expected).max(axis=0))
    worst = int(np.argmax(differences / np.maximum(ranges, np.finfo(np.float32).tiny)))
    return float(differences[worst]), float(ranges[worst])


def _decides_alike(bundle: Bundle, expected: Array) -> bool:
    """Whether the decision is the same for every image."""
    if bundle.task == "multilabel":
        chosen = expected >= _limits(bundle)
        return bool((chosen == chosen[0]).all())
    return bundle.task == "classify" and len(set(expected.argmax(1))) == 1


def _limits(bundle: Bundle) -> Array:
    """Return the logits at the thresholds of several labels."""
    probabilities = np.clip(np.asarray(bundle.thresholds), 1e-9, 1 - 1e-9)
    limits: Array = np.log(probabilities / (1 - probabilities))
    return limits


def _agreement(bundle: Bundle, found: Array, expected: Array) -> float | None:
    if bundle.task == "regress":
        return None
    if bundle.task != "multilabel":
        return float((found.argmax(1) == expected.argmax(1)).mean())
    limits = _limits(bundle)
    chosen, reference = found >= limits, expected >= limits
    either = int((chosen | reference).sum())
    return float((chosen & reference).sum() / either) if either else None


def _variation_error(found: Array, expected: Array) -> float | None:
    variation = float(np.linalg.norm(expected - expected.mean(axis=0)))
    return float(np.linalg.norm(found - expected)) / variation if variation else None


def _cosine(found: Array, expected: Array) -> float | None:
    if expected.shape[1] < 2:
        return None
    products = (found * expected).sum(axis=1, dtype=np.float64)
    norms = np.linalg.norm(found.astype(np.float64), axis=1) * np.linalg.norm(expected.astype(np.float64), axis=1)
    return float((products / np.maximum(norms, 1e-30)).min())


def batched(items: Sequence[Any], size: int = BATCH) -> Iterator[list[Any]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


SAMPLE_NAME = "the two embedded photos"


def sample_photos(count: int = 24, *, channels: int = 3, rectangles: bool = False) -> list[Image.Image]:
    """Return crops of the two embedded photos, where no data is given: squares, or of any shape. `channels` are the model's."""
    if channels not in (1, 3, 4):  # to which photos are converted
        raise VitrailError(
            f"The embedded photos have 3 channels, but the model takes {channels}. Give images to compare on: --data folder:DIR."
        )
    photos = [Image.open(io.BytesIO(embedded.photo(name))).convert("RGB") for name in embedded.PHOTOS]
    generator = np.random.default_rng(0)
    crops = []
    for number in range(count):
        photo = photos[number % len(photos)]
        side = int(generator.integers(150, min(photo.size)))
        width, height = (int(generator.integers(20, length)) for length in photo.size) if rectangles else (side, side)
        left, top = (int(generator.integers(0, most + 1)) for most in (photo.width - width, photo.height - height))
        crops.append(photo.crop((left, top, left + width, top + height)))
    return crops


def images_of(split: Split, count: int, classes: Sequence[str] | None) -> tuple[list[Any], list[int] | None]:
    """Return up to `count` images spread evenly over a split, and their outputs' numbers where the classes are the model's."""
    numbers = np.linspace(0, len(split) - 1, min(count, len(split))).round().astype(int).tolist()
    images = [split.payload(number) for number in numbers]
    if split.task != "classify" or classes is None or not set(split.classes) <= set(classes):
        return images, None
    outputs = [list(classes).index(name) for name in split.classes]  # by name: a dataset may lack classes, or order them otherwise
    return images, [outputs[int(split.targets[number])] for number in numbers]
