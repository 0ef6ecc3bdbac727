"""Means over the steps between two records of a run: loss, gradient norm, speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vitrail.train.speed import memory, peak_flops

if TYPE_CHECKING:
    from vitrail.train.loop import Loop


class IntervalMeans:
    """Mean loss, gradient norm and speed over the steps since the last record; no step is in two records."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.peak = peak_flops(loop.world.device)
        self.records = 0
        self.restart()
        self.fresh = True

    def restart(self) -> None:
        """Count time from here on."""
        loop = self.loop
        if loop.world.device.type == "cuda":
            torch.cuda.synchronize(loop.world.device)
        self.first, self.fresh = loop.done, False
        loop.clock.restart()
        loop.loader.data_wait.reset()

    def record(self) -> dict[str, Any]:
        loop = self.loop
        reading = loop.step.read()
        seconds, steps = max(loop.clock.seconds, 1e-9), loop.done - self.first
        images = steps * loop.recipe.batch / seconds
        per_device = images / loop.world.ranks
        speed = {
            "images_per_second": round(images, 3),
            "mfu": round(per_device * loop.prepared.flops / self.peak, 5) if self.peak else None,
            "data_wait": round(loop.loader.data_wait.fraction(), 5),
            "memory": memory(loop.world.device),
            "seconds": round(seconds, 4),
        }
        self._advise()
        record = {
            "kind": "train",
            "step": loop.done,
            "epoch": round(loop.done / loop.loader.steps, 5),
            "loss": reading.loss,
            **loop.prepared.task.train_metrics(reading.loss),
            "lr": loop.step.rate(loop.done - 1) * loop.recipe.optim.lr,
            "grad_norm": reading.grad_norm,
            "skipped": reading.skipped,
            "speed": speed,
        }
        self.restart()
        return record

    def _advise(self) -> None:
        """Once, after the third record: what to do if the run waits for data."""
        loop = self.loop
        self.records += 1
        if self.records == 3:
            advice = loop.loader.data_wait.advice(loop.loader.workers, loop.world.local_ranks)
            if advice:
                loop.say(advice)
