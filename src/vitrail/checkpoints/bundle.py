"""A loaded checkpoint: the model with everything that is needed to use it rightly."""

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
    """One answer for one image. `score` is a probability, or for a regression the value itself."""

    label: str
    index: int
    score: float


@dataclass
class Bundle:
    """What `vitrail.load` gives."""

    model: Model
    preprocess: Preprocess | None
    classes: tuple[str, ...] | None
    task: str
    report: Report
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> Literal["set", "zero", "none"]:
        """Whether the head was trained, is all zeros (published without, or new), or is not there."""
        heads = [head for head in (self.model.head, getattr(self.model, "distill_head", None)) if isinstance(head, nn.Linear)]
        if not heads:
            return "none"
        return "set" if any(bool(head.weight.detach().any()) for head in heads) else "zero"

    @property
    def reading(self) -> dict[str, Any]:
        """What training said on how outputs are to be read: their activation, thresholds of labels."""
        said = self.provenance.get("task")
        return said if isinstance(said, dict) else {}

    @property
    def sigmoid(self) -> bool:
        """Whether each output is a probability of its own, as the model was trained, or all together sum to 1."""
        return self.task == "multilabel" or self.reading.get("activation") == "sigmoid"

    def predict(self, images: Any, top: int = 5) -> list[list[Prediction]]:
        """The `top` answers for each image, best first.

        `images` is one image or a sequence of them: paths, file contents, Pillow images or arrays, which are preprocessed as
        this checkpoint says; or a float tensor [images, channels, height, width] that already is.
        """
        self.check_head()
        if top < 1:
            raise VitrailError(f"top is {top}; at least one answer must be asked for.")
        answers: list[list[Prediction]] = []
        for batch in self._batches(images):
            answers += self._answers(batch, top)
        return answers

    def label(self, index: int) -> str:
        return self.classes[index] if self.classes else str(index)

    def check_head(self) -> None:
        """Refuse to answer with a head that was never trained."""
        if self.head == "set":
            return
        what = "Head is all zeros" if self.head == "zero" else "There is no head"
        raise VitrailError(
            f"{what}: {self.report.source} is a backbone only, and any prediction would be chance. "
            f"Fine-tune it on your classes (`vitrail finetune`), or use its features (`vitrail fewshot`, `vitrail embed`)."
        )

    def _batches(self, images: Any) -> Iterator[Tensor]:
        if isinstance(images, Tensor):
            yield from (images if images.ndim == 4 else images[None]).split(_BATCH)
            return
        single = isinstance(images, (str, bytes, os.PathLike)) or not isinstance(images, Sequence)
        several = [images] if single else list(images)
        if self.preprocess is None:
            raise VitrailError(
                f"No preprocessing is recorded in {self.report.source}. Google's ViTs take [−1, 1] and a square resize: "
                f"load it with preprocess='google-vit', or another of the presets."
            )
        for start in range(0, len(several), _BATCH):
            yield torch.stack(
                [self.preprocess(image, name=_name(image, start + i)) for i, image in enumerate(several[start : start + _BATCH])]
            )

    @torch.no_grad()
    def _answers(self, batch: Tensor, top: int) -> list[list[Prediction]]:
        weight = self.model.norm.weight
        with evaluating(self.model):
            return self.read(self.model(batch.to(weight.device, weight.dtype)), top)

    def read(self, outputs: Tensor, top: int = 5) -> list[list[Prediction]]:
        """What the model's outputs [images, outputs] mean: the `top` answers for each image, best first."""
        logits = outputs.float().cpu()
        if self.task == "regress":
            return [[Prediction(self.label(i), i, value) for i, value in enumerate(row)] for row in logits.tolist()]
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=1)
        values, indices = scores.topk(min(top, scores.shape[1]), dim=1)
        rows = zip(values.tolist(), indices.tolist(), strict=True)
        return [[Prediction(self.label(i), i, value) for value, i in zip(*row, strict=True)] for row in rows]


def _name(image: Any, number: int) -> str:
    return str(image) if isinstance(image, (str, os.PathLike)) else f"image {number}"
