"""Validation of a model on a split: every image once, over all ranks."""

from __future__ import annotations

import torch

from vitrail.data.loader import EvalLoader
from vitrail.data.preprocess import Preprocess
from vitrail.data.types import Split
from vitrail.models.features import evaluating
from vitrail.tasks import Meter, Task
from vitrail.train.parallel import Runner
from vitrail.train.step import autocast


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
    meter, steps = task.meter(), 0
    with evaluating(runner.model):
        for part in loader:
            with autocast(precision, world.device):
                outputs = task.predict(runner, part.images, part.indices)
            meter.update(outputs, part.targets)
            steps += 1
        if world.sharded:
            _keep_step(runner, task, preprocess, max(world.gather(steps)) - steps)
            runner.reshard()
    states = world.gather(meter.state())
    for rank, state in enumerate(states):
        if rank != world.rank:
            meter.add(state)
    return meter


def _keep_step(runner: Runner, task: Task, preprocess: Preprocess, missing: int) -> None:
    """Run empty batches: all ranks gather shards together, so one that has no batch left must still take part."""
    nothing = torch.zeros(1, preprocess.channels, *preprocess.size, device=runner.world.device)
    for _ in range(missing):
        task.predict(runner, nothing, torch.zeros(1, dtype=torch.int64))
