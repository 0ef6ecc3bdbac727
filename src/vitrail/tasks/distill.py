"""Learning from a teacher as well as from labels (Touvron et al. 2021).

A model with a distillation token learns the labels with its class token and the teacher with the other; one without learns
both with its only head. The token order is class, distillation, registers, patches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError, counted
from vitrail.tasks.base import Meter, Task
from vitrail.tasks.classify import Classify


class Distill(Task):
    """`hard`: the teacher's best class is a second label. `soft`: its whole distribution, at a temperature.

    The teacher sees the student's crops under its own preprocessing: its size, mean and deviation.
    """

    kind = "classify"
    headline = "accuracy"

    def __init__(
        self,
        labels: Classify,
        teacher: nn.Module,
        *,
        classes: tuple[str, ...],
        teacher_classes: tuple[str, ...],
        preprocess: Preprocess,
        teacher_preprocess: Preprocess,
        mode: Literal["hard", "soft"] = "hard",
        weight: float = 0.5,
        temperature: float = 3.0,
        two_heads: bool = False,
    ) -> None:
        check_classes(classes, teacher_classes)
        if preprocess.channels != teacher_preprocess.channels:
            raise VitrailError(
                f"The teacher has {counted(teacher_preprocess.channels, 'input channel')}, the student {preprocess.channels}. "
                f"Use --model.channels {teacher_preprocess.channels}, or another teacher."
            )
        self.labels, self.outputs, self.two_heads = labels, labels.outputs, two_heads
        self.mode, self.weight, self.temperature = mode, weight, temperature
        self.preprocess, self.teacher_preprocess = preprocess, teacher_preprocess
        values = (preprocess.mean, preprocess.std, teacher_preprocess.mean, teacher_preprocess.std)
        self._statistics = [torch.tensor(one)[:, None, None] for one in values]
        self.teacher = teacher.eval().requires_grad_(False)

    def objective(self, run: Callable[..., Any], images: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = self.teacher(self.as_teacher_sees(images)).float()
        if self.two_heads:
            by_class, by_teacher = run(images, heads=2)
        else:
            by_class = by_teacher = run(images)
        distilled = self.distillation_loss(by_teacher, teacher_logits)
        return (1 - self.weight) * self.labels.loss(by_class, targets) + self.weight * distilled

    def distillation_loss(self, outputs: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return how far the student is from the teacher, image by image."""
        logits = outputs.float()
        if self.mode == "hard":
            return F.cross_entropy(logits, teacher_logits.argmax(1), reduction="none")
        warm = self.temperature
        gap = F.kl_div((logits / warm).log_softmax(1), (teacher_logits / warm).log_softmax(1), reduction="none", log_target=True)
        return gap.sum(1) * warm**2  # so that the gradient's scale does not depend on the temperature

    def as_teacher_sees(self, images: Tensor) -> Tensor:
        """Return the student's input, undone and done again as the teacher's."""
        theirs, ours = self.teacher_preprocess, self.preprocess
        if theirs.size != ours.size:
            images = F.interpolate(images, theirs.size, mode="bilinear", antialias=True, align_corners=False)
        if (theirs.mean, theirs.std) == (ours.mean, ours.std):
            return images
        mean, std, their_mean, their_std = self._statistics
        return (images * std + mean - their_mean) / their_std

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.labels.loss(outputs, targets)

    def meter(self) -> Meter:
        return self.labels.meter()

    def metric_names(self) -> tuple[str, ...]:
        return self.labels.metric_names()

    def to(self, device: Any) -> Task:
        self.teacher.to(device)
        self._statistics = [one.to(device) for one in self._statistics]  # a copy per step could not be captured in a CUDA graph
        self.labels.to(device)
        return self

    def describe(self) -> dict[str, Any]:
        return self.labels.describe()


def check_classes(classes: tuple[str, ...], teacher_classes: tuple[str, ...]) -> None:
    """Refuse a teacher whose outputs are not the same classes in the same order."""
    if classes == teacher_classes:
        return
    if set(classes) == set(teacher_classes):
        first = next(k for k, (ours, theirs) in enumerate(zip(classes, teacher_classes, strict=True)) if ours != theirs)
        raise VitrailError(
            f"Student and teacher have the same classes in another order: output {first} is {classes[first]!r} here and "
            f"{teacher_classes[first]!r} in the teacher. Load the data with the teacher's class order."
        )
    ours = sorted(set(classes) - set(teacher_classes))
    theirs = sorted(set(teacher_classes) - set(classes))
    raise VitrailError(
        f"Student and teacher have different classes: {len(classes)} and {len(teacher_classes)}"
        f"{f'; the teacher does not know {ours[0]!r}' if ours else ''}"
        f"{f'; only the teacher knows {theirs[0]!r}' if theirs else ''}. "
        "Distill on data with the teacher's classes, or fine-tune the teacher on these first."
    )
