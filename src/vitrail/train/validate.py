"""Validation of a model on a split: every image once, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vitrail.data.loader import EvalLoader
from vitrail.data.preprocess import Preprocess
from vitrail.data.types import Split
from vitrail.errors import VitrailError
from vitrail.models import Model
from vitrail.models.features import evaluating
from vitrail.tasks import Meter, Task
from vitrail.train.attention_stats import AttentionProbe, AttentionStats
from vitrail.train.best_checkpoint import RAW
from vitrail.train.parallel import Runner
from vitrail.train.precision import autocast

if TYPE_CHECKING:
    from vitrail.train.loop import Loop


@dataclass(frozen=True)
class Validation:
    """The metrics at one step, of the weights that are saved; with averaging also of the raw weights, named `raw_…`."""

    step: int
    meter: Meter
    raw_meter: Meter | None
    metrics: dict[str, float]
    attention: AttentionStats | None = None
    """Of the raw weights, which are those that are trained."""

    def of_weights(self, *, raw: bool) -> tuple[Meter, dict[str, float]]:
        """Return the meter and the metrics of one set of weights, under their plain names."""
        if raw and self.raw_meter is not None:
            return self.raw_meter, self.raw_meter.metrics()
        return self.meter, {name: value for name, value in self.metrics.items() if not name.startswith(RAW)}


class Validator:
    """Validates a run in progress: the weights that are saved, and with averaging the raw weights too."""

    def __init__(self, loop: Loop, evaluators: Sequence[Callable[[Model], dict[str, float]]] = ()) -> None:
        self.loop, self.evaluators = loop, list(evaluators)
        self._probe = AttentionProbe(loop)

    def evaluate(self, step: int) -> Validation | None:
        """Return the metrics, the same on every rank; None without validation images."""
        loop, split = self.loop, self.loop.prepared.validation
        if split is None or len(split) == 0:
            return None
        average, attention = loop.step.average, self._probe.measure()
        raw = self._meter(split) if average is not None else None
        with nullcontext() if average is None else average.applied():
            meter = self._meter(split)
            metrics = meter.metrics()
            for evaluator in self.evaluators:
                metrics |= evaluator(loop.prepared.model)
        if raw is not None:
            of_raw = raw.metrics()
            metrics |= {RAW + name: of_raw[name] for name in loop.prepared.task.metric_names() if name in of_raw}
        # Ranks add the same sums in different orders, and decisions must not depend on the last bit.
        return Validation(step, meter, raw, loop.world.broadcast(metrics), attention)

    def _meter(self, split: Split) -> Meter:
        loop = self.loop
        return validate(
            loop.step.runner,
            loop.prepared.task,
            split,
            loop.prepared.preprocess,
            batch=min(loop.micro_batch, 512),
            precision=loop.precision,
            workers=loop.recipe.data.workers,
            bad_images=loop.recipe.data.bad_images,
        )


@torch.no_grad()
def validate(
    runner: Runner,
    task: Task,
    split: Split,
    preprocess: Preprocess,
    *,
    batch: int,
    precision: str,
    workers: int | None = None,
    bad_images: str = "error",
) -> Meter:
    """Return a meter over the whole split, on every rank."""
    world = runner.world
    loader = EvalLoader(
        split,
        preprocess=preprocess,
        batch=batch,
        rank=world.rank,
        ranks=world.ranks,
        local_ranks=world.local_ranks,
        workers=workers,
        bad_images=bad_images,  # type: ignore[arg-type]
        device=world.device,
    )
    meter, steps, images = task.meter(), 0, 0
    with evaluating(runner.model):
        for part in loader:
            with autocast(precision, world.device):
                outputs = task.predict(runner, part.images, part.indices)
            meter.update(outputs, part.targets)
            steps, images = steps + 1, images + len(part)
        if world.sharded:
            _join_others(runner, task, preprocess, precision, max(world.gather(steps)) - steps)
            runner.reshard()
    found = world.gather((meter.state(), images))
    if not any(count for _, count in found):
        raise VitrailError(
            f"No image of the split {split.name} can be read, so there is nothing to validate on. `vitrail data check` says why; "
            "hold out training images instead with --data.holdout 0.1."
        )
    for rank, (state, _) in enumerate(found):
        if rank != world.rank:
            meter.add(state)
    return meter


def _join_others(runner: Runner, task: Task, preprocess: Preprocess, precision: str, batches: int) -> None:
    """Run batches of one black image: all ranks gather shards together, so one that has no images left must still take part."""
    black = torch.zeros(1, preprocess.channels, *preprocess.size, device=runner.world.device)
    for _ in range(batches):
        with autocast(precision, runner.world.device):  # gathered weights are in low precision
            task.predict(runner, black, torch.zeros(1, dtype=torch.int64))
