"""The training loop: every task, every size, from a laptop to a cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from vitrail.data import Source, Split
from vitrail.data.batch import Batch
from vitrail.data.loader import TrainLoader
from vitrail.data.worker_signals import raise_worker_error
from vitrail.errors import VitrailError, counted
from vitrail.models import Model, ViTConfig
from vitrail.train.attention_stats import AttentionStats
from vitrail.train.averaging import Average
from vitrail.train.best_checkpoint import Selection, check_metric
from vitrail.train.callbacks import Callback, MetricsFile, RunInfo
from vitrail.train.config import Recipe
from vitrail.train.determinism import deterministic, threads
from vitrail.train.export import changed_images, held_out_before, record_images, resolved, with_earlier
from vitrail.train.final_model import write_models
from vitrail.train.fp8 import use_fp8
from vitrail.train.interval_means import IntervalMeans
from vitrail.train.nonfinite import nonfinite_weight
from vitrail.train.optimizers import Optimizer
from vitrail.train.parallel import Runner, World, blocks_of, joined
from vitrail.train.parameter_groups import all_groups, freeze, group_lines
from vitrail.train.precision import chosen_precision, shard_dtype
from vitrail.train.prepare import Prepared, prepare
from vitrail.train.recovery import find_micro_batch, halve_micro_batch, handle_nonfinite, refuse_to_save, without_compiling
from vitrail.train.result import Result, finished
from vitrail.train.run import RunFolder
from vitrail.train.schedules import describe_schedule, in_steps
from vitrail.train.sharded_init import fill_shards, twin_of
from vitrail.train.snapshots import Snapshots
from vitrail.train.speed import Clock
from vitrail.train.step import Step
from vitrail.train.stopping import Stop
from vitrail.train.validate import Validation, Validator

Evaluator = Callable[[Model], dict[str, float]]
MakeEvaluator = Callable[[Prepared, World], Evaluator]
"""Called once, when data and devices are known."""


class CheckImages(Protocol):
    """Called by all ranks with the opened data, before a new run builds its model."""

    def __call__(self, source: Source, splits: Sequence[Split], *, world: World) -> None: ...


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    evaluators: Sequence[MakeEvaluator] = (),
    allow_change: Sequence[str] = (),
    prepared: Prepared | None = None,
    curves: bool = True,
    check_images: CheckImages | None = None,
) -> Result:
    """Train a recipe into a run folder; if the folder holds the same run, resume it.

    `evaluators` add metrics to the task's own, at every validation. `prepared` replaces the recipe's data and model with ones
    that you built in Python. Without `curves`, figures/curves.png is not drawn, which takes longer than a tiny run.
    `check_images` may look at the images before a new run begins.
    """
    with joined(recipe.device, recipe.parallel) as world, deterministic(recipe.deterministic), threads(recipe.threads):
        run = RunFolder(out)
        try:
            if world.main:
                run.hold()
            world.barrier()
            recipe = run.keep_warmup(run.keep_split(recipe))
            changed = run.check_unchanged(recipe, allow_change)
            end = run.end()
            if end is not None and not changed:
                return finished(run, end)
            check = None if check_images is None or run.has_begun() else partial(check_images, world=world)
            prepared = prepared or prepare(recipe, on_meta=world.sharded, check_images=check)
            loop = Loop(recipe, run, world, prepared, callbacks, evaluators)
            loop.draws_curves = curves
            try:
                return loop.run_to_the_end()
            except RuntimeError as error:
                raise_worker_error(error)
                world.raise_rank_error(error)
                raise
            finally:
                loop.close()
        finally:
            run.release()


class Loop:
    """A run in progress. Its state lives in `step` (weights, optimiser, average) and `done`, the number of steps taken."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        world: World,
        prepared: Prepared,
        callbacks: Sequence[Callback],
        evaluators: Sequence[MakeEvaluator] = (),
    ) -> None:
        self.draws_curves = True
        self.recipe, self.run, self.world, self.prepared = recipe, run, world, prepared
        if evaluators and world.sharded:
            raise VitrailError(f"Evaluators need the whole model on each device; --parallel is {world.mode}. Use --parallel ddp.")
        self.validator = Validator(self, [make(prepared, world) for make in evaluators])
        has_validation = prepared.validation is not None and len(prepared.validation) > 0
        check_metric(recipe, prepared.task, has_validation=has_validation, has_evaluators=bool(evaluators))
        self.selection = Selection(recipe, prepared.task)
        self.callbacks = [MetricsFile(run), *callbacks] if world.main else []
        self.precision = self._choose_precision()
        self.micro_batch = first_micro_batch(recipe, world)
        self.loader = self._make_loader()
        self.total = total_steps(recipe, self.loader.steps)
        self.schedule = in_steps(recipe.schedule, self.total, self.loader.steps)
        self.step = self._make_step()
        self.snapshots = Snapshots(run.checkpoints, world, keep=recipe.keep)
        self.done, self.skipped_steps, self.rollbacks = 0, set[int](), 0
        self.clock = Clock()
        self._validation: Validation | None = None
        self.warned_of_collapse = False

    # Setting up

    def _choose_precision(self) -> str:
        """Resolve `auto`. On a CPU a resumed run keeps the precision that it began with, whatever this CPU would choose."""
        recipe, device = self.recipe, self.world.device
        saved = self.world.broadcast(self.run.saved_precision() if self.world.main else None)
        if recipe.precision == "auto" and device.type == "cpu" and saved is not None:
            return str(saved)
        # Convolutions of a ResNet do not gain from bf16 there.
        vit = isinstance(self.prepared.model.config, ViTConfig)
        return chosen_precision(recipe.precision, device, self.prepared.flops / 3 if vit else 0)

    def _make_loader(self) -> TrainLoader:
        recipe, world = self.recipe, self.world
        loader = TrainLoader(
            self.prepared.train,
            preprocess=self.prepared.preprocess,
            augment=recipe.augment,
            batch=recipe.batch,
            seed=recipe.seed,
            sampling=recipe.data.sampling,
            rank=world.rank,
            ranks=world.ranks,
            local_ranks=world.local_ranks,
            micro_batch=self.micro_batch,
            workers=recipe.data.workers,
            bad_images=recipe.data.bad_images,
            device=world.device,
        )
        loader.set_total_steps(total_steps(recipe, loader.steps))
        return loader

    def _make_step(self) -> Step:
        recipe, model, draw = self.recipe, self.prepared.trained, self.prepared.initialise
        self.prepared.task.to(self.world.device)
        model.train()
        freeze(model, recipe.optim, head_only=recipe.model.freeze)
        if self.precision == "fp8":
            use_fp8(model, recipe, self.world)
        twin = twin_of(model) if draw is not None else model.to(self.world.device)
        runner = Runner(model, self.world, param_dtype=shard_dtype(self.precision, self.world.device))
        if draw is not None:
            fill_shards(model, twin, draw, self.world.device)
        if recipe.compile:
            # In place, so that names in checkpoints stay as they are. Shards are gathered block by block, and compiled so.
            for part in blocks_of(model) if self.world.sharded else [model]:
                part.compile()
        average = Average(model, recipe.ema, warmup=recipe.ema_warmup) if recipe.ema else None
        optimizer = Optimizer(model, recipe.optim)
        return Step(
            runner,
            self.prepared.task,
            optimizer,
            recipe,
            total=self.total,
            precision=self.precision,
            average=average,
            schedule=self.schedule,
        )

    def _begin(self) -> None:
        """Load the newest checkpoint, if there is one, and announce the run."""
        state = self.snapshots.load(self.step.tensors())
        if state is not None:
            self.return_to(state)
        else:
            self._start_anew()
        find_micro_batch(self)
        if self.world.main:
            self.prepared.trained_on = record_images(self.recipe, self.prepared)
            if self.done:
                if warning := changed_images(self.run, self.prepared):
                    self.say(warning)
                self.prepared.trained_on = with_earlier(self.run.saved_images(), self.prepared.trained_on)
        facts = resolved(
            self.recipe,
            self.prepared,
            self.world,
            precision=self.precision,
            total=self.total,
            schedule=self.schedule,
            micro_batch=self.micro_batch,
        )
        if self.world.main:
            self.run.write_config(self.recipe, facts)
        for note in (*self.prepared.notes, *self._setting()):
            self.say(note)
        for warning in held_out_before(self.recipe, self.prepared) if self.world.main else ():
            self.say(warning)
        if self.loader.note:
            self.say(self.loader.note)
        if self.done:
            self.say(f"resumed at step {self.done} of {self.total}, epoch {self.done / self.loader.steps:.1f}")
        self.tell(
            "started",
            RunInfo(
                name=self.recipe.name,
                out=self.run.path,
                steps=self.total,
                steps_per_epoch=self.loader.steps,
                first=self.done,
                headline=self.prepared.task.headline,
                config=self.recipe.to_dict(),
            ),
        )

    def _start_anew(self) -> None:
        if self.snapshots.found_corrupted and self.world.main:
            kept = self.run.keep_log()
            log = f"; the log so far is kept in {kept.name}" if kept is not None else ""
            self.say(f"warning: no checkpoint of this run is valid, so it starts anew at step 0{log}")
        elif self.run.has_begun():
            self.say("warning: this run ended before its first checkpoint, so it starts anew at step 0")
        if self.world.main:
            self.run.forget_after(0)

    def _setting(self) -> list[str]:
        """Describe what decides the result and the memory."""
        recipe, ranks = self.recipe, self.world.ranks
        parts = math.ceil(recipe.batch / ranks / self.micro_batch)
        devices = f"{ranks} devices, {self.world.mode}" if ranks > 1 else "1 device"
        lines = [f"batch: {recipe.batch} = {self.micro_batch} at once × {parts} × {devices}"]
        groups = group_lines(all_groups(self.prepared.trained, recipe.optim), recipe.optim)
        lines.append(f"optimiser: {recipe.optim.name}, {self.precision}; {'; '.join(groups)}")
        lines.append(f"schedule: {describe_schedule(recipe.schedule, counted(self.total, 'step'), self.schedule)}")
        return lines

    def return_to(self, state: dict[str, Any]) -> None:
        try:
            self.done = state["step"]
            self.skipped_steps |= set(state["skipped_steps"])
            self.step.load_state(state)
            self.selection.load_state(state.get("selection"))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise VitrailError(
                f"state.json of the checkpoint of step {state.get('step')} in {self.run.checkpoints} has been changed ({error}). "
                "Delete that checkpoint, and run the same command again to resume from the one before."
            ) from error
        self.warned_of_collapse = state.get("warned_of_collapse", False)
        self.go_to(self.done)
        if self.world.main:
            self.run.forget_after(self.done)

    def go_to(self, number: int) -> None:
        """Continue the data with step `number`."""
        epoch, step = divmod(number, self.loader.steps)
        self.loader.load_state_dict({**self.loader.state_dict(), "epoch": epoch, "step": step})
        self.batches = iter(self.loader)

    def set_micro_batch(self, size: int) -> None:
        """Change the micro-batch from here on; the batches stay the same."""
        self.micro_batch = size
        self.loader.close()
        self.loader = self._make_loader()
        self.step.reset_capture()

    # Running

    def run_to_the_end(self) -> Result:
        self.go_to(0)
        self._begin()
        means = IntervalMeans(self)
        if self.done == 0 and self.recipe.on_nonfinite == "rollback":
            self._save()  # there must be something to roll back to
        with Stop().handling_signals() as stop:
            while self.done < self.total and not self.selection.stops:
                self._next_step()
                if self.done - means.first == 1 and means.fresh:
                    means.restart()  # the first step compiled, tuned and allocated
                if self._checks_nonfinite() and handle_nonfinite(self):
                    means.restart()
                    continue
                self._log_and_save(means)
                if self._must_stop(stop):
                    return self._interrupted(stop)
            return self._finish(stop)

    def _next_step(self) -> None:
        number = self.done
        if number in self.skipped_steps:
            for _ in self.micro_batches():
                pass
        else:
            self._take(number)
        self.done += 1

    def _take(self, number: int) -> None:
        while True:
            try:
                self.step.take(self.micro_batches(), number)
                if reason := self.step.why_not_captured():
                    self.say(f"warning: the step could not be captured as a CUDA graph ({reason}); it runs without, more slowly")
                return
            except torch.OutOfMemoryError as error:
                halve_micro_batch(self, error)
            except torch._dynamo.exc.TorchDynamoException as error:
                without_compiling(self, error)
            self.step.optimizer.zero_grad()
            if self.world.sharded or self.world.ranks == 1:  # DDP needs all ranks for it, and they may not be here
                self.step.runner.renew()
            self.go_to(number)

    def micro_batches(self) -> Iterator[Batch]:
        """This rank's micro-batches of the next step."""
        while True:
            batch = next(self.batches)
            yield batch
            if batch.completes_step:
                return

    def _log_and_save(self, means: IntervalMeans) -> None:
        logs = self.done == self.total or self.done % self.recipe.log_every == 0
        if logs:
            self.tell("trained", means.record())
        best = self._validates() and self._validate()
        if self.selection.stops and not logs:
            self.tell("trained", means.record())
        if self._saves() or best or self.selection.stops:
            with self.clock.paused():
                self._save()

    def _checks_nonfinite(self) -> bool:
        """Return whether to check for non-finite gradients: on a CPU always, on a GPU when it is synchronised anyway."""
        return self.world.device.type == "cpu" or self.done % self.recipe.log_every == 0 or self._saves() or self._validates()

    def _validates(self) -> bool:
        return self.done == self.total or self._due(self._eval_interval())

    def _saves(self) -> bool:
        interval = self.recipe.checkpoint_every or self._eval_interval() or max(self.total // 10, 1)
        return self.done == self.total or self._due(interval)

    def _due(self, interval: int) -> bool:
        return bool(interval) and self.done % interval == 0

    def _eval_interval(self) -> int:
        return round(max(self.recipe.eval_every * self.loader.steps, 1)) if self.recipe.eval_every else 0

    def _validate(self) -> bool:
        """Validate and log; return whether the checkpoint of this step is to be kept as the best."""
        with self.clock.paused():
            self._validation = self.validator.evaluate(self.done)
        if self._validation is None:
            return False
        metrics = self._validation.metrics
        best = self.selection.update(metrics, self.done) and self.selection.keeps_best
        record = {"kind": "val", "step": self.done, "epoch": self.done / self.loader.steps, **metrics}
        attention = self._validation.attention
        if attention is not None:
            record |= attention.record()
        self.tell("validated", {**record, "best": self.selection.metric} if best else record)
        if metrics.get("predicted_classes") == 1 and self.prepared.task.outputs > 1:
            self.say(
                "warning: the model predicts the same class for every image. Lower the learning rate, or use a longer warm-up."
            )
        self._warn_of_collapse(attention)
        return best

    def _warn_of_collapse(self, attention: AttentionStats | None) -> None:
        """Say once in a run that attention has collapsed."""
        config = self.prepared.model.config
        text = "" if attention is None else attention.warning(qk_norm=isinstance(config, ViTConfig) and config.qk_norm)
        if text and not self.warned_of_collapse:
            self.warned_of_collapse = True
            self.say(text)

    def _save(self) -> None:
        tensors = self.step.tensors()
        nonfinite = next(filter(None, self.world.gather(nonfinite_weight(tensors))), "")
        if nonfinite:
            refuse_to_save(self, nonfinite)
            return
        state = {
            **self.step.state(),
            "skipped_steps": sorted(self.skipped_steps),
            "ranks": self.world.ranks,
            "selection": self.selection.state(),
            "warned_of_collapse": self.warned_of_collapse,
        }
        best = self.selection.best if self.selection.keeps_best else None
        self.snapshots.save(self.done, tensors, state, best=None if best is None else best.step)

    # Ending

    def _must_stop(self, stop: Stop, *, at_end: bool = False) -> bool:
        """Return whether any rank got a signal to stop. On GPUs ranks exchange that only where they are synchronised anyway."""
        if self.world.ranks == 1:
            return stop.requested
        if self.world.device.type != "cpu" and self.done % self.recipe.log_every and not at_end:
            return False
        if not self.world.any(stop.requested):
            return False
        stop.signal = max(number or 0 for number in self.world.gather(stop.signal))  # all ranks exit with the same status
        return True

    def _interrupted(self, stop: Stop) -> Result:
        took_all = self.done == self.total or self.selection.stops  # and then the last step is saved
        if not took_all:
            handle_nonfinite(self)  # on a GPU not checked at every step: those after a bad one changed nothing and are not saved
            self._save()
        self.snapshots.finish()
        stopped, again = f"stopped at step {self.done} of {self.total} and saved", "run the same command again to"
        self.say(f"{stopped}, before model/ was written; {again} write it" if took_all else f"{stopped}; {again} resume")
        return Result(self.run.path, self.done, self.prepared.task.headline, {}, ended_by=stop.signal)

    def _finish(self, stop: Stop) -> Result:
        """Validate and write `model/`. A signal stops this until `model/` is begun; from there on, the run is finished first."""
        self.snapshots.finish()
        if self._must_stop(stop, at_end=True):
            return self._interrupted(stop)
        if self.selection.stops and self.done < self.total:
            self.say(f"stopped early at step {self.done} of {self.total}: {self.selection.reason()}")
        validation = self._validation
        if validation is None or validation.step != self.done:  # resumed after its last step
            validation = self.validator.evaluate(self.done)
            if self._must_stop(stop, at_end=True):
                return self._interrupted(stop)
        saved, metrics = write_models(self, validation)
        task = self.prepared.task
        end = {"kind": "end", "step": self.done, "headline": task.headline, "seconds": round(self.run.seconds(), 3)}
        end |= {"stopped_early": self.done < self.total, "model": saved.to_dict(), **metrics}
        if self.world.main:
            if self.draws_curves:
                from vitrail.train.curves import draw_curves

                draw_curves(self.run, headline=task.headline)
            self.run.add(end)
            if self.loader.bad:
                count = self.loader.save_bad_images(str(self.run.path / "bad-images.txt"))
                self.say(f"{counted(count, 'image')} could not be read, and others were used instead; see bad-images.txt")
        self.world.barrier()
        return dataclasses.replace(finished(self.run, end), before=False)

    def close(self) -> None:
        self.step.reset_capture()  # NCCL waits for graphs that hold its operations
        self.loader.close()
        self.snapshots.close()
        for callback in self.callbacks:
            callback.closed()

    # Messages

    def say(self, text: str) -> None:
        self.tell("note", text)

    def tell(self, event: str, what: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(what)


def total_steps(recipe: Recipe, per_epoch: int) -> int:
    """Return the optimiser steps of the whole run."""
    if recipe.steps is not None:
        return recipe.steps
    if recipe.epochs is None:
        raise VitrailError("The length of the run is missing: add --epochs or --steps.")
    return max(1, round(recipe.epochs * per_epoch))


def first_micro_batch(recipe: Recipe, world: World) -> int:
    """Return the first micro-batch to try: the rank's whole part of the batch, but at most 256 on a CPU."""
    per_rank = math.ceil(recipe.batch / world.ranks)
    if recipe.micro_batch != "auto":
        return min(int(recipe.micro_batch), per_rank)
    return per_rank if world.device.type == "cuda" else min(per_rank, 256)
