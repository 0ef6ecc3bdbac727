"""Running a model over a split: every image once over all ranks, whatever the batch, the workers or the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.loader import EvalLoader
from vitrail.data.preprocess import Preprocess
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError
from vitrail.models import Model
from vitrail.models.features import evaluating
from vitrail.train.parallel import World
from vitrail.train.step import autocast

Precision = Literal["fp32", "bf16", "fp16"]
BadImages = Literal["error", "skip"]
T = TypeVar("T")


def no_progress(images: int) -> None:
    """Tells no one."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """How images are brought through a model. None of it changes what is measured, but for the rounding of `precision`."""

    world: World = field(default_factory=lambda: World(torch.device("cpu")))
    batch: int = 64
    workers: int | None = None
    precision: Precision = "fp32"
    bad_images: BadImages = "error"
    progress: Callable[[int], None] = no_progress
    """Told how many images are done since it was last told."""

    def over(self, split: Split, preprocess: Preprocess, model: Model, compute: Callable[[Tensor], T]) -> Pass[T]:
        """A pass of `compute`, which is the model or a part of it, over this rank's images."""
        return Pass(self, split, preprocess, model, compute)


class Pass(Iterator[tuple[T, Batch]]):
    """An iterator over batches with what was computed of them. Afterwards `bad` says what could not be read."""

    def __init__(
        self, running: Running, split: Split, preprocess: Preprocess, model: Model, compute: Callable[[Tensor], T]
    ) -> None:
        world = running.world
        self._running, self._model, self._compute = running, model, compute
        self._loader = EvalLoader(
            split,
            preprocess=preprocess,
            batch=running.batch,
            rank=world.rank,
            ranks=world.ranks,
            ranks_here=world.ranks_here,
            # A few images are read sooner than a worker has started.
            workers=0 if len(split) <= running.batch else running.workers,
            bad_images=running.bad_images,
            device=world.device,
        )
        self._steps = self._run()

    @property
    def bad(self) -> dict[str, BadImage]:
        return self._loader.bad

    def __next__(self) -> tuple[T, Batch]:
        return next(self._steps)

    def _run(self) -> Iterator[tuple[T, Batch]]:
        running = self._running
        for batch in self._loader:
            # Entered anew for every batch, so that a caller who stops half-way finds the model as it was.
            with torch.no_grad(), evaluating(self._model), autocast(running.precision, running.world.device):
                computed = self._compute(batch.images)
            yield computed, batch
            running.progress(len(batch))


def all_bad(running: Running, bad: dict[str, BadImage]) -> list[BadImage]:
    """The bad images of all ranks, by name."""
    found = {one.name: one for part in running.world.gather(list(bad.values())) for one in part}
    return [found[name] for name in sorted(found)]


def check_finite(outputs: Tensor, batch: Batch, split: Split) -> None:
    """An output that is not a number would count as a wrong answer and hide what went wrong."""
    rows = torch.nonzero(~outputs.isfinite().flatten(1).all(1))[:, 0]
    if len(rows):
        name = split.image_name(int(batch.indices[rows[0].cpu()]))
        raise VitrailError(
            f"The model's output for {name} holds NaN or infinity. Check the weights (`vitrail info`); "
            "if they are sound, --precision bf16 or fp32 has the range that fp16 lacks."
        )
