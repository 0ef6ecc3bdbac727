"""A loaded checkpoint: the model with its preprocessing, class names and task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from vitrail.checkpoints.report import Report
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError, counted
from vitrail.models import Model, ViTConfig

if TYPE_CHECKING:
    from vitrail.data.trained_on import TrainedOn


@dataclass(frozen=True)
class Prediction:
    """One predicted class of an image. `score` is its probability, or the predicted value for a regression."""

    label: str
    index: int
    score: float
    chosen: bool = True
    """Of a multi-label model: whether the probability reaches the label's threshold, so that the image has the label."""


@dataclass
class Bundle:
    """What a checkpoint holds. `vitrail.load` returns one that can also predict, evaluate and so on: `vitrail.Bundle`."""

    model: Model
    preprocess: Preprocess | None
    classes: tuple[str, ...] | None
    task: str
    report: Report
    provenance: dict[str, Any] = field(default_factory=dict)
    classes_assumed: bool = False
    """Whether the class names are a guess, as `report.assumptions` says: the file has none, but as many outputs as ImageNet."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.describe())})"

    def describe(self) -> list[str]:
        """Return the model, its input, its outputs and where it is from, in a few words each."""
        config = self.model.config
        outputs = counted(config.outputs, "class", "classes") if config.outputs else "no head"
        if config.outputs and self.task != "classify":
            outputs = counted(config.outputs, "label" if self.task == "multilabel" else "output")
        return [config.name, image_shape(config.image_size, config.channels), outputs, f"from {self.report.source}"]

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
    def trained_on(self) -> tuple[TrainedOn, ...]:
        """Records of the images that the model was trained on, and the model that it started from; empty if unknown."""
        from vitrail.data.trained_on import records_in

        return records_in(self.provenance, self.report.source)

    @property
    def sigmoid(self) -> bool:
        """Whether the model was trained with a sigmoid per output; otherwise the outputs go through a softmax."""
        return self.task == "multilabel" or self.task_info.get("activation") == "sigmoid"

    @property
    def thresholds(self) -> tuple[float, ...]:
        """From which probability on a multi-label model predicts each label: as chosen in training, else 0.5."""
        saved = self.task_info.get("thresholds")
        return tuple(saved) if saved is not None else (0.5,) * self.model.config.outputs

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
        """Return the preprocessing, checked against the model.

        Where there is none or it does not fit, raise an error that names the option of the command that sets it.
        """
        if self.preprocess is None:
            raise VitrailError(
                f"No preprocessing is stored in {self.report.source}. Choose one: {option} google-vit for Google's ViTs "
                f"([−1, 1], square resize), or another preset, such as imagenet; in Python load(…, preprocess='google-vit')."
            )
        config, given = self.model.config, self.preprocess
        any_size = not isinstance(config, ViTConfig)  # a ResNet
        if given.channels != config.channels or (given.size != config.image_size and not any_size):
            raise VitrailError(
                f"The preprocessing stored in {self.report.source} makes images of {image_shape(given.size, given.channels)}, but "
                f"the model takes {image_shape(config.image_size, config.channels)}. Correct `preprocess` in its config.json, or "
                f"replace it: {option} with a preset such as google-vit."
            )
        return given

    def scores(self, outputs: Tensor) -> Tensor:
        """Turn the model's outputs into probabilities, by softmax or sigmoid; the values of a regression stay as they are."""
        logits = outputs.float().cpu()
        if self.task == "regress":
            return logits
        return logits.sigmoid() if self.sigmoid else logits.softmax(dim=1)

    def decode(self, outputs: Tensor, top: int = 5) -> list[list[Prediction]]:
        """Turn the model's outputs [images, outputs] into the `top` predictions per image, best first.

        Of a multi-label model, labels that reach their thresholds come before all others.
        """
        scores = self.scores(outputs)
        if self.task == "regress":
            return [[Prediction(self.label(i), i, value) for i, value in enumerate(row)] for row in scores.tolist()]
        if self.task != "multilabel":
            best = scores.topk(min(top, scores.shape[1]), dim=1)
            rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            return [[Prediction(self.label(i), i, score) for i, score in zip(*row, strict=True)] for row in rows]
        chosen = scores.double() >= torch.tensor(self.thresholds, dtype=torch.float64)  # in float64, as in evaluation
        by_score = scores.argsort(dim=1, descending=True, stable=True)
        indices = by_score.gather(1, chosen.gather(1, by_score).int().argsort(dim=1, descending=True, stable=True))[:, :top]
        picked = zip(indices.tolist(), scores.gather(1, indices).tolist(), chosen.gather(1, indices).tolist(), strict=True)
        return [[Prediction(self.label(i), i, score, yes) for i, score, yes in zip(*row, strict=True)] for row in picked]


def image_shape(size: tuple[int, int], channels: int) -> str:
    """Return `224×224 pixels with 3 channels`."""
    return f"{size[0]}×{size[1]} pixels with {counted(channels, 'channel')}"
