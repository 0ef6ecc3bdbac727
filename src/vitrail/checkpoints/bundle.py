"""A loaded checkpoint: the model with its preprocessing, class names and task."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.checkpoints.report import Report
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.models import Model
from vitrail.models.features import evaluating

_BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """One predicted class of an image. `score` is its probability, or the predicted value for a regression."""

    label: str
    index: int
    score: float


@dataclass
class Bundle:
    """The result of `vitrail.load`."""

    model: Model
    preprocess: Preprocess | None
    classes: tuple[str, ...] | None
    task: str
    report: Report
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> Literal["set", "zero", "none"]:
        """Whether the head has weights ("set"), is all zeros ("zero": new, or published so), or is missing ("none")."""
        heads = [head for head in (self.model.head, getattr(self.model, "distill_head", None)) if isinstance(head, nn.Linear)]
        if not heads:
            return "none"
        return "set" if any(bool(head.weight.detach().any()) for head in heads) else "zero"

    @property
    def task_info(self) -> dict[str, Any]:
        """What training recorded about the task: the activation of the outputs, thresholds per label."""
        recorded = self.provenance.get("task")
        return recorded if isinstance(recorded, dict) else {}

    @property
    def sigmoid(self) -> bool:
        """Whether the model was trained with a sigmoid per output; otherwise the outputs go through a softmax."""
        return self.task == "multilabel" or self.task_info.get("activation") == "sigmoid"

    def predict(self, images: Any, top: int = 5) -> list[list[Prediction]]:
        """Return the `top` predictions per image, best first.

        `images` is one image or a sequence of images: paths, file contents, Pillow images or arrays, which are preprocessed
        with `self.preprocess`; or a preprocessed float tensor [images, channels, height, width].
        """
        self.check_head()
        if top < 1:
            raise VitrailError(f"top is {top}; it must be at least 1.")
        predictions: list[list[Prediction]] = []
        for batch in self._batches(images):
            predictions += self._predict_batch(batch, top)
        return predictions

    def label(self, index: int) -> str:
        return self.classes[index] if self.classes else str(index)

    def check_head(self) -> None:
        """Raise an error if there is no trained head."""
        if self.head == "set":
            return
        what = "The head is all zeros" if self.head == "zero" else "There is no head"
        raise VitrailError(
            f"{what}: {self.report.source} is only a backbone, and its predictions would be at chance level. "
            f"Fine-tune it on your classes (`vitrail finetune`), or use its features (`vitrail fewshot`, `vitrail embed`)."
        )

    def stored_preprocess(self, option: str = "--preprocess") -> Preprocess:
        """Return the preprocessing; where there is none, raise an error that names the option of the command that sets it."""
        if self.preprocess is None:
            raise VitrailError(
                f"No preprocessing is stored in {self.report.source}. Choose one: {option} google-vit for Google's ViTs "
                f"([−1, 1], square resize), or another preset, such as imagenet; in Python load(…, preprocess='google-vit')."
            )
        return self.preprocess

    def _batches(self, images: Any) -> Iterator[Tensor]:
        if isinstance(images, Tensor):
            yield from (images if images.ndim == 4 else images[None]).split(_BATCH)
            return
        is_single = isinstance(images, (str, bytes, os.PathLike)) or not isinstance(images, Sequence)
        items = [images] if is_single else list(images)
        preprocess = self.stored_preprocess()
        for start in range(0, len(items), _BATCH):
            yield torch.stack(
                [preprocess(image, name=_name(image, start + i)) for i, image in enumerate(items[start : start + _BATCH])]
            )

    @torch.no_grad()
    def _predict_batch(self, batch: Tensor, top: int) -> list[list[Prediction]]:
        weight = self.model.norm.weight
        with evaluating(self.model):
            return self.decode(self.model(batch.to(weight.device, weight.dtype)), top)

    def decode(self, outputs: Tensor, top: int = 5) -> list[list[Prediction]]:
        """Turn the model's outputs [images, outputs] into the `top` predictions per image, best first."""
        logits = outputs.float().cpu()
        if self.task == "regress":
            return [[Prediction(self.label(i), i, value) for i, value in enumerate(row)] for row in logits.tolist()]
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=1)
        values, indices = scores.topk(min(top, scores.shape[1]), dim=1)
        rows = zip(values.tolist(), indices.tolist(), strict=True)
        return [[Prediction(self.label(i), i, value) for value, i in zip(*row, strict=True)] for row in rows]


def _name(image: Any, number: int) -> str:
    return str(image) if isinstance(image, (str, os.PathLike)) else f"image {number}"
