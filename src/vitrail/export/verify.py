"""Compare an exported model with the PyTorch model on real images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.checkpoints import Bundle
from vitrail.data.types import Split
from vitrail.errors import VitrailError
from vitrail.export.artefact import Array, Artefact
from vitrail.models.features import evaluating

BATCH = 8


@dataclass(frozen=True)
class Threshold:
    """What a precision may cost. `error` is relative to the spread of the logits, `agreement` the share of equal top classes."""

    error: float | None
    agreement: float


THRESHOLDS = {
    "fp32": Threshold(error=1e-4, agreement=0.99),
    "fp16": Threshold(error=1e-2, agreement=0.98),
    "bf16": Threshold(error=5e-2, agreement=0.95),
    "int8": Threshold(error=None, agreement=0.95),
}


@dataclass(frozen=True)
class Comparison:
    """The differences between an exported model and the PyTorch model in float32."""

    images: int
    data: str
    max_difference: float
    """Of logits."""
    spread: float
    """The largest logit minus the smallest, of the PyTorch model."""
    agreement: float
    """Fraction of images whose highest logit is the same output's."""
    accuracy: float | None = None
    reference_accuracy: float | None = None

    def problems(self, precision: str) -> list[str]:
        """Say which limits of this precision are missed."""
        limit, found = THRESHOLDS[precision], []
        if not np.isfinite(self.max_difference):
            return ["logits are not finite"]
        if limit.error is not None and self.max_difference > (allowed := limit.error * max(self.spread, 1.0)):
            found.append(f"logits differ by up to {self.max_difference:.2g}, allowed is {allowed:.2g}")
        if self.agreement < limit.agreement:
            found.append(f"the top class is the same for {self.agreement:.1%} of the images, needed is {limit.agreement:.0%}")
        return found

    def describe(self) -> str:
        text = (
            f"{self.images} images of {self.data}: largest difference of logits {self.max_difference:.2g} "
            f"(they spread over {self.spread:.3g}), same top class for {self.agreement:.1%}"
        )
        if self.accuracy is not None and self.reference_accuracy is not None:
            text += f", accuracy {self.accuracy:.1%} (PyTorch {self.reference_accuracy:.1%})"
        return text


def compare(
    bundle: Bundle, artefact: Artefact, images: Sequence[Any], labels: Sequence[int] | None = None, *, data: str = ""
) -> Comparison:
    """Run both models on images, each with its own preprocessing, and compare."""
    if not images:
        raise VitrailError("There is no image to compare on.")
    expected: list[Array] = []
    found: list[Array] = []
    for batch in batched(images):
        inputs = torch.stack([bundle.stored_preprocess()(image) for image in batch])
        with torch.no_grad(), evaluating(bundle.model):
            expected.append(bundle.model(inputs.to(next(bundle.model.parameters()).device)).float().cpu().numpy())
        found.append(np.asarray(artefact.run(artefact.prepare(batch)), dtype=np.float32))
    reference, logits = np.concatenate(expected), np.concatenate(found)
    if logits.shape != reference.shape:
        raise VitrailError(f"{artefact.path} gives logits {logits.shape}, {bundle.report.source} {reference.shape}: another model.")
    known = None if labels is None else np.asarray(labels)
    top, reference_top = logits.argmax(1), reference.argmax(1)
    return Comparison(
        images=len(images),
        data=data,
        max_difference=float(np.abs(logits - reference).max()),
        spread=float(reference.max() - reference.min()),
        agreement=float((top == reference_top).mean()),
        accuracy=None if known is None else float((top == known).mean()),
        reference_accuracy=None if known is None else float((reference_top == known).mean()),
    )


def batched(items: Sequence[Any], size: int = BATCH) -> Iterator[list[Any]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


def sample_photos(count: int = 24) -> list[Image.Image]:
    """Return crops of the two photos that scikit-learn contains, where no data is given."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    generator = np.random.default_rng(0)
    crops = []
    for number in range(count):
        photo = photos[number % len(photos)]
        side = int(generator.integers(150, min(photo.size)))
        left, top = (int(generator.integers(0, length - side + 1)) for length in photo.size)
        crops.append(photo.crop((left, top, left + side, top + side)))
    return crops


def images_of(split: Split, count: int, classes: Sequence[str] | None) -> tuple[list[Any], list[int] | None]:
    """Return up to `count` images spread evenly over a split, and their outputs' numbers where the classes are the model's."""
    numbers = np.linspace(0, len(split) - 1, min(count, len(split))).round().astype(int).tolist()
    images = [split.payload(number) for number in numbers]
    if split.task != "classify" or classes is None or tuple(split.classes) != tuple(classes):
        return images, None
    return images, [int(split.targets[number]) for number in numbers]
