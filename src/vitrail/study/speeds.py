"""How fast rows are: measured on a few, estimated for the others by their FLOPs."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from vitrail.models import BiTConfig, ModelConfig, ViTConfig
from vitrail.train.config import ModelSpec, Recipe
from vitrail.train.plan import config_of
from vitrail.train.speed import training_flops

if TYPE_CHECKING:
    from vitrail.study.plan import PlannedRow


@dataclass(frozen=True)
class Sample:
    """What a short run took: seconds per image of its two phases, and of everything around them."""

    pretrain: float | None
    finetune: float | None
    overhead: float


@dataclass
class Speeds:
    """Seconds per image by kind of run and FLOPs, and the overhead of a row."""

    _points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _overheads: list[float] = field(default_factory=list)

    def add(self, row: PlannedRow, sample: Sample) -> None:
        for recipe, seconds in ((row.pretrain, sample.pretrain), (_finetuned(row), sample.finetune)):
            if recipe is not None and seconds is not None:
                self._points.setdefault(kind(recipe), []).append((cost(recipe), seconds))
        self._overheads.append(sample.overhead)

    @property
    def overhead(self) -> float:
        """Seconds of a row besides training."""
        return statistics.median_low(self._overheads) if self._overheads else 0.0

    def training(self, row: PlannedRow) -> tuple[float, float]:
        """Estimate the seconds of a row's pre-training and of its fine-tuning."""
        return self._seconds(row.pretrain), self._seconds(_finetuned(row))

    def _seconds(self, recipe: Recipe | None) -> float:
        return 0.0 if recipe is None else (recipe.steps or 0) * recipe.batch * self.per_image(recipe)

    def per_image(self, recipe: Recipe) -> float:
        """Return the seconds of training on one image, interpolated between the nearest measured costs."""
        flops = cost(recipe)
        points = sorted(self._points.get(kind(recipe)) or [one for all_ in self._points.values() for one in all_])
        if not points:
            return 0.0
        below, above = [one for one in points if one[0] <= flops], [one for one in points if one[0] >= flops]
        if not below:
            return points[0][1]  # a smaller model is hardly faster where Python is what takes the time
        (low, fast), (high, slow) = below[-1], (above or below[-1:])[0]
        if not above:
            return fast * flops / low
        return fast if high == low else fast + (flops - low) / (high - low) * (slow - fast)


def _finetuned(row: PlannedRow) -> Recipe | None:
    """Return the fine-tuning recipe with the model that it will have."""
    if row.finetune is None or row.pretrain is None:
        return row.finetune
    size = row.finetune.model.image_size or row.pretrain.model.image_size
    return row.finetune.replace(model=dataclasses.replace(row.pretrain.model, image_size=size))


@cache
def _config(model: ModelSpec) -> ModelConfig:
    return config_of(model, 1)


def cost(recipe: Recipe) -> float:
    """Return the FLOPs of training on one image; for self-supervised tasks as if it were supervised, to compare like with like."""
    return float(training_flops(_config(recipe.model)))


def kind(recipe: Recipe) -> str:
    """Return what speed depends on besides FLOPs: the family, the task, and positions that have kernels of their own."""
    config = _config(recipe.model)
    family = "BiT" if isinstance(config, BiTConfig) else "hybrid" if isinstance(config, ViTConfig) and config.resnet else "ViT"
    task = recipe.task.kind if recipe.task.kind.startswith("masked") else "classify"
    position = "relative" if recipe.model.position == "relative" else ""
    return f"{family} {task} {position}"
