"""One optimiser step: micro-batches forward and backward, clipping, the update.

The host never waits for the device here. Loss and norm are kept there until they are read, and a step with a
non-finite gradient is skipped by the update kernel itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.errors import VitrailError
from vitrail.tasks import Task
from vitrail.train.averaging import Average
from vitrail.train.captured_step import DDP_WARMUP, WARMUP, CapturedStep, on_stream
from vitrail.train.config import Recipe, ScheduleSpec
from vitrail.train.optimizers import Optimizer
from vitrail.train.parallel import Runner, World
from vitrail.train.precision import autocast
from vitrail.train.schedules import factor


def seed_micro_batch(seed: int, step: int, number: int, world: World) -> None:
    """Set torch's generators for one micro-batch, from where it stands: so dropout needs no saved state to resume."""
    digest = hashlib.blake2b(f"{seed} {step} {number} {world.rank}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1
    # Not torch.manual_seed: without a GPU that remembers every call in case one should appear.
    torch.default_generator.manual_seed(value)
    if world.device.type == "cuda":
        torch.cuda.default_generators[world.device.index or 0].manual_seed(value)  # not that of the current device
    elif world.device.type == "mps":
        torch.mps.manual_seed(value)


@dataclass(frozen=True)
class Reading:
    """What happened in the steps since the last reading."""

    steps: int
    loss: float
    grad_norm: float
    skipped: int
    """Steps skipped because their gradient was not finite."""


class Step:
    """Takes optimiser steps, numbered from 0 over the whole run."""

    def __init__(
        self,
        runner: Runner,
        task: Task,
        optimizer: Optimizer,
        recipe: Recipe,
        *,
        total: int,
        precision: str,
        average: Average | None,
        schedule: ScheduleSpec,
    ) -> None:
        """`schedule` is the recipe's with its lengths in steps."""
        self.schedule = schedule
        self.runner, self.task, self.optimizer, self.recipe = runner, task, optimizer, recipe
        self.total, self.precision, self.average = total, precision, average
        self.world, device = runner.world, runner.world.device
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        if self.scaler is not None and self.world.sharded:
            raise VitrailError("fp16 with loss scaling cannot be combined with sharding; use --precision bf16.")
        # Once a gradient was bad, `stop` and `rollback` leave the weights as they are until the error is handled.
        self.halts_when_bad = recipe.on_nonfinite != "skip"
        self._loss, self._norm, self._skipped, self._halted = (torch.zeros((), device=device) for _ in range(4))
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self._steps = 0
        self._not_captured = ""
        self._captured = self._make_captured()

    def take(self, batches: Iterable[Batch], number: int) -> None:
        """Take step `number`, over this rank's micro-batches."""
        self.optimizer.set_rate(self.rate(number))
        self.runner.reshard()
        loss = torch.zeros((), device=self.world.device)
        for batch in batches:
            seed_micro_batch(self.recipe.seed, number, batch.micro_step, self.world)
            loss += self.backward(batch)
        self._update(loss, number)
        if self.average is not None:
            self.average.update(number)

    def backward(self, batch: Batch) -> Tensor:
        """Add a micro-batch's gradient; returns its part of the step's mean loss."""
        # With an engine a replay sums gradients over ranks, which only the last micro-batch of a step should do.
        whole = self.world.mode == "single" or batch.micro_steps == 1
        with self.runner.accumulating(batch.completes_step):
            if self._captured is not None and whole and batch.total == self.recipe.batch:
                return self._captured(batch.images, batch.targets)  # type: ignore[no-any-return]
            with on_stream(self.runner.stream):
                return self._backward(batch.images, batch.targets, batch.total)

    def why_not_captured(self) -> str:
        """Why the step could not be captured as a CUDA graph; empty where it could, and after the first call."""
        reason, self._not_captured = self._not_captured, ""
        return reason

    def reset_capture(self) -> None:
        """Give back the memory of the captured step; it is captured again after some ordinary steps."""
        if self._captured is not None:
            self.optimizer.zero_grad()  # gradients may lie in it
            self._captured.reset()

    def _backward(self, images: Tensor, targets: Tensor, total: int) -> Tensor:
        with autocast(self.precision, self.world.device):
            losses = self.task.objective(self.runner, images, targets)
        # Engines average over ranks; the step is a mean over its images, wherever they were computed.
        loss = losses.sum() * (self.world.ranks / total)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def _make_captured(self) -> CapturedStep | None:
        """Forward and backward as a CUDA graph, on one GPU, and under DDP or FSDP2 with their collectives.

        Under FSDP2 only where blocks stay gathered: large models do not wait for the CPU.
        """
        recipe, world, runner = self.recipe, self.world, self.runner
        if world.device.type != "cuda" or self.scaler is not None or recipe.compile or not recipe.cuda_graph:
            return None
        if world.sharded and not runner.keeps_gathered:
            return None

        def step(images: Tensor, targets: Tensor) -> Tensor:
            loss = self._backward(images, targets, recipe.batch)
            runner.join_streams()
            return loss

        return CapturedStep(
            step,
            self.optimizer.parameters,
            warmup=DDP_WARMUP if world.mode == "ddp" else WARMUP,
            stream=runner.stream,
            any_rank=world.any,
            on_failure=self._capture_failed,
            captures_shards=True,
        )

    def _capture_failed(self, reason: str) -> None:
        self._not_captured = reason
        self.runner.renew()

    def rate(self, number: int) -> float:
        return factor(self.schedule, number, self.total, self.recipe.optim.lr)

    @torch.no_grad()
    def _update(self, loss: Tensor, number: int) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer.torch_optimizer)
        norm = self.optimizer.grad_norm()
        bad = fault = (~norm.isfinite()).float()
        if self.scaler is not None:
            self.scaler.update()
            # Overflow is how the scale finds its level; it is a fault only when no scale helps.
            fault = bad * (torch.as_tensor(self.scaler._scale) < 1)
        if self.halts_when_bad:
            self._halted = torch.maximum(self._halted, fault)
        self.optimizer.step(skip=torch.maximum(self._halted, bad), norm=norm)
        self.optimizer.zero_grad()
        self._first_bad = torch.where((self._first_bad < 0) & (fault > 0), number, self._first_bad)
        self._skipped += bad
        self._loss += torch.where(bad > 0, 0.0, loss)
        self._norm += torch.where(bad > 0, 0.0, norm)
        self._steps += 1

    def read(self) -> Reading:
        """Return what was summed since the last call. Here the host waits for the device."""
        total = self.world.sum(torch.stack([self._loss, self._norm, self._skipped]))
        loss, norm, skipped = (total / self.world.ranks).tolist()
        counted = max(self._steps - round(skipped), 1)
        reading = Reading(self._steps, loss / counted, norm / counted, round(skipped))
        self.forget()
        return reading

    def forget(self) -> None:
        for kept in (self._loss, self._norm, self._skipped):
            kept.zero_()
        self._halted = torch.zeros_like(self._halted)
        self._first_bad = torch.full_like(self._first_bad, -1)
        self._steps = 0

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold, by name."""
        tensors = {f"model.{name}": value for name, value in self.runner.model.state_dict(keep_vars=True).items()}
        tensors |= {f"optim.{name}": value for name, value in self.optimizer.tensors().items()}
        if self.average is not None:
            tensors |= {f"ema.{name}": value for name, value in self.average.tensors().items()}
        return {name: value.detach() for name, value in tensors.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides tensors: the loss scale, and the sums of the steps not read yet."""
        window = self.world.sum(torch.stack([self._loss, self._norm, self._skipped])) / self.world.ranks
        scaler = self.scaler.state_dict() if self.scaler is not None else None
        return {"scaler": scaler, "window": window.tolist(), "window_steps": self._steps}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.forget()
        for kept, value in zip((self._loss, self._norm, self._skipped), state["window"], strict=True):
            kept.fill_(value)
        self._steps = state["window_steps"]

    def clear_bad(self) -> None:
        self._first_bad = torch.full_like(self._first_bad, -1)

    def first_bad(self) -> int | None:
        """The first step since the last reading whose gradient was not finite. Here the host waits."""
        number = int(self._first_bad.item())
        return number if number >= 0 else None
