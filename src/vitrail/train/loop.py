"""The one loop: every task, every size, from a laptop to a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.data.batch import Batch
from vitrail.data.loader import TrainLoader
from vitrail.errors import VitrailError
from vitrail.tasks import Meter
from vitrail.train.averaging import Average
from vitrail.train.config import Recipe
from vitrail.train.determinism import deterministic
from vitrail.train.export import export_model, resolved
from vitrail.train.listeners import Facts, Listener, MetricsFile
from vitrail.train.nonfinite import advice, first_fault
from vitrail.train.optimizers import Optimizer
from vitrail.train.parallel import Runner, World, blocks_of, joined
from vitrail.train.prepare import Prepared, prepare
from vitrail.train.run import RunFolder
from vitrail.train.schedules import check_schedule
from vitrail.train.snapshots import Snapshots
from vitrail.train.speed import Clock, memory, peak_flops, training_flops
from vitrail.train.step import Step, autocast, chosen_precision, low_precision, seed_part
from vitrail.train.stopping import Stop
from vitrail.train.validate import validate

_ROLLBACKS = 5


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    out: Path
    steps: int
    headline: str
    metrics: dict[str, float]
    seconds: float = 0.0
    ended_by: int | None = None
    """The signal that interrupted it, or None when it is finished."""
    before: bool = False
    """Whether it had been finished already."""


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    listeners: Sequence[Listener] = (),
    allow_change: Sequence[str] = (),
    prepared: Prepared | None = None,
) -> Result:
    """Train as a recipe says, into a run folder; where that folder holds the same run, go on with it.

    `prepared` takes the place of the recipe's own data and model, for those who build them in Python.
    """
    with joined(recipe.device, recipe.parallel) as world, deterministic(recipe.deterministic):
        run = RunFolder(out)
        try:
            if world.main:
                run.hold()
            world.barrier()
            changed = run.check_unchanged(recipe, allow_change)
            end = run.end()
            if end is not None and not changed:
                figures = {name: value for name, value in end.items() if name not in ("kind", "step", "headline", "seconds")}
                return Result(run.path, end["step"], end["headline"], figures, end["seconds"], before=True)
            loop = Loop(recipe, run, world, prepared or prepare(recipe), listeners)
            try:
                return loop.run_to_the_end()
            finally:
                loop.close()
        finally:
            run.release()


class Loop:
    """A run in progress. Its state lives in `step` (weights, optimiser, average) and `done`, the number of steps taken."""

    def __init__(self, recipe: Recipe, run: RunFolder, world: World, prepared: Prepared, listeners: Sequence[Listener]) -> None:
        self.recipe, self.run, self.world, self.prepared = recipe, run, world, prepared
        self.listeners = [MetricsFile(run), *listeners] if world.main else []
        self.precision = chosen_precision(recipe.precision, world.device)
        self.loader = self._make_loader()
        self.total = total_steps(recipe, self.loader.steps)
        check_schedule(recipe.schedule, self.total)
        self.step = self._make_step()
        self.snapshots = Snapshots(run.checkpoints, world, keep=recipe.keep)
        self.done, self.passed_over, self.rollbacks = 0, set[int](), 0
        self.clock, self.peak = Clock(), peak_flops(world.device, self.precision)
        self._measured: tuple[int, Meter] | None = None

    # Setting up

    def _make_loader(self) -> TrainLoader:
        recipe, world = self.recipe, self.world
        return TrainLoader(
            self.prepared.train,
            preprocess=self.prepared.preprocess,
            augment=recipe.augment,
            batch=recipe.batch,
            seed=recipe.seed,
            sampling=recipe.data.sampling,
            rank=world.rank,
            ranks=world.ranks,
            ranks_here=world.ranks_here,
            micro_batch=first_micro_batch(recipe, world),
            workers=recipe.data.workers,
            bad_images=recipe.data.bad_images,
            device=world.device,
        )

    def _make_step(self) -> Step:
        recipe, model = self.recipe, self.prepared.model.to(self.world.device)
        self.prepared.task.to(self.world.device)
        model.train()
        runner = Runner(model, self.world, low_precision=low_precision(self.precision))
        if recipe.compile:
            # In place, so that names in checkpoints stay as they are. Shards are gathered block by block, and compiled so.
            for part in blocks_of(model) if self.world.sharded else [model]:
                part.compile()
        average = Average(model, recipe.ema, warmup=recipe.ema_warmup) if recipe.ema else None
        optimizer = Optimizer(model, recipe.optim)
        return Step(runner, self.prepared.task, optimizer, recipe, total=self.total, precision=self.precision, average=average)

    def _begin(self) -> None:
        """Find the place to go on from, and tell everybody."""
        state = self.snapshots.load(self.step.tensors())
        if state is not None:
            self._return_to(state)
        elif self.world.main:
            self.run.forget_after(0)
        self._find_micro_batch()
        facts = resolved(self.recipe, self.prepared, self.world, self.precision, self.total, self.loader)
        if self.world.main:
            self.run.write_config(self.recipe, facts)
        for note in self.prepared.notes:
            self.say(note)
        if self.loader.note:
            self.say(self.loader.note)
        if self.done:
            self.say(f"resumed at step {self.done} of {self.total}, epoch {self.done / self.loader.steps:.1f}")
        self.tell(
            "started",
            Facts(
                name=self.recipe.name,
                out=self.run.path,
                steps=self.total,
                steps_per_epoch=self.loader.steps,
                first=self.done,
                headline=self.prepared.task.headline,
                config=self.recipe.to_dict(),
            ),
        )

    def _return_to(self, state: dict[str, Any]) -> None:
        self.done = state["step"]
        self.passed_over |= set(state["passed_over"])
        self.step.load_state(state)
        self._go_to(self.done)
        if self.world.main:
            self.run.forget_after(self.done)

    def _go_to(self, number: int) -> None:
        """Let the data go on with step `number`."""
        epoch, step = divmod(number, self.loader.steps)
        self.loader.load_state_dict({**self.loader.state_dict(), "epoch": epoch, "step": step})
        self.batches = iter(self.loader)

    # Running

    def run_to_the_end(self) -> Result:
        self._go_to(0)
        self._begin()
        window = Window(self)
        if self.done == 0 and self.recipe.on_nonfinite == "rollback":
            self._save()  # there must be something to roll back to
        with Stop().listening() as stop:
            while self.done < self.total:
                self._next_step()
                if self.done - window.first == 1 and window.fresh:
                    window.restart()  # the first step compiled, tuned and allocated
                if self._handle_nonfinite(window):
                    continue
                self._talk_and_save(window)
                if self._must_stop(stop):
                    return self._interrupted(stop)
        return self._finish()

    def _next_step(self) -> None:
        number = self.done
        if number in self.passed_over:
            for _ in self._parts():
                pass
        else:
            self._take(number)
        self.done += 1

    def _take(self, number: int) -> None:
        while True:
            try:
                self.step.take(self._parts(), number)
                return
            except torch.OutOfMemoryError as error:
                self._halve_micro_batch(error)
            except torch._dynamo.exc.TorchDynamoException as error:
                self._without_compiling(error)
            self.step.optimizer.zero_grad()
            self._go_to(number)

    def _parts(self) -> Iterator[Batch]:
        """This rank's micro-batches of the next step."""
        while True:
            batch = next(self.batches)
            yield batch
            if batch.last:
                return

    def _talk_and_save(self, window: Window) -> None:
        last = self.done == self.total
        if last or self.done % self.recipe.log_every == 0:
            self.tell("trained", window.record())
        measure = last or self._due(self._eval_interval())
        if measure:
            self._validate()
        if last or self._due(self.recipe.checkpoint_every or self._eval_interval() or max(self.total // 10, 1)):
            with self.clock.paused():
                self._save()

    def _due(self, interval: int) -> bool:
        return bool(interval) and self.done % interval == 0

    def _eval_interval(self) -> int:
        return round(max(self.recipe.eval_every * self.loader.steps, 1)) if self.recipe.eval_every else 0

    def _validate(self) -> None:
        split = self.prepared.validation
        if split is None or len(split) == 0:
            return
        with self.clock.paused(), self._averaged():
            meter = validate(
                self.step.runner,
                self.prepared.task,
                split,
                self.prepared.preprocess,
                batch=self._eval_batch(),
                precision=self.precision,
                workers=self.recipe.data.workers,
                bad_images=self.recipe.data.bad_images,
            )
        self._measured = (self.done, meter)
        metrics = meter.metrics()
        self.tell("validated", {"kind": "val", "step": self.done, "epoch": self.done / self.loader.steps, **metrics})
        if metrics.get("predicted_classes") == 1 and self.prepared.task.outputs > 1:
            self.say("warning: the model gives every image the same class. Lower the learning rate, or lengthen the warm-up.")

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return self.step.average.applied() if self.step.average is not None else contextlib.nullcontext()

    def _eval_batch(self) -> int:
        return min(self.loader.micro_batch or self.recipe.batch, 512)

    def _save(self) -> None:
        state = {**self.step.state(), "passed_over": sorted(self.passed_over), "ranks": self.world.ranks}
        self.snapshots.save(self.done, self.step.tensors(), state)

    # Ending

    def _must_stop(self, stop: Stop) -> bool:
        """Whether any rank was asked to stop. On GPUs ranks compare notes only where they wait for each other anyway."""
        if self.world.ranks == 1:
            return stop.asked
        if self.world.device.type != "cpu" and self.done % self.recipe.log_every:
            return False
        return self.world.any(stop.asked)

    def _interrupted(self, stop: Stop) -> Result:
        if self.done < self.total:
            self._save()
        self.snapshots.finish()
        self.say(f"stopped at step {self.done} of {self.total} and saved; the same command goes on from here")
        return Result(self.run.path, self.done, self.prepared.task.headline, {}, ended_by=stop.signal or signal.SIGTERM)

    def _finish(self) -> Result:
        self.snapshots.finish()
        if self._measured is None or self._measured[0] != self.done:
            self._validate()
        meter = self._measured[1] if self._measured is not None else None
        metrics = meter.metrics() if meter is not None else {}
        with self._averaged():
            export_model(self.run, self.recipe, self.prepared, self.world, metrics, meter, self.done)
        seconds = sum(one["speed"]["seconds"] for one in self.run.records() if one["kind"] == "train")
        task = self.prepared.task
        if self.world.main:
            from vitrail.train.curves import draw_curves

            draw_curves(self.run, headline=task.headline)
            self.run.add({"kind": "end", "step": self.done, "headline": task.headline, "seconds": round(seconds, 3), **metrics})
            if self.loader.bad:
                count = self.loader.save_bad_images(str(self.run.path / "bad-images.txt"))
                self.say(f"{count} images could not be read and were replaced by others; they are listed in bad-images.txt")
        self.world.barrier()
        return Result(self.run.path, self.done, task.headline, metrics, seconds)

    def close(self) -> None:
        self.snapshots.close()
        for listener in self.listeners:
            listener.closed()

    # When things go wrong

    def _handle_nonfinite(self, window: Window) -> bool:
        """Look whether a gradient was not finite, where looking costs nothing; True when the run went back."""
        policy = self.recipe.on_nonfinite
        looks = self.world.device.type == "cpu" or self.done % self.recipe.log_every == 0 or self._about_to_save()
        bad = self.step.first_bad() if looks else None
        if bad is None:
            return False
        if policy == "skip":
            self.say(f"warning: the gradient of step {bad} was not finite; the step was left out")
            self.step.clear_bad()
            return False
        explained = self._explain(bad)
        if policy == "stop" or self.rollbacks >= _ROLLBACKS:
            raise VitrailError(f"{explained} {advice(self.precision, self.recipe.optim.lr)}")
        self.rollbacks += 1
        self.snapshots.finish()
        state = self.snapshots.load(self.step.tensors())
        if state is None:
            raise VitrailError(f"{explained} There is no whole checkpoint to go back to.")
        self._return_to(state)
        self.passed_over.add(bad)
        window.restart()
        self.say(f"warning: {explained} Back to step {self.done}; step {bad} will be passed over.")
        return True

    def _about_to_save(self) -> bool:
        interval = self.recipe.checkpoint_every or self._eval_interval() or max(self.total // 10, 1)
        return self.done == self.total or self._due(interval)

    def _explain(self, number: int) -> str:
        """Take the step again, watching every layer. The weights have not moved since."""
        epoch = number // self.loader.steps
        self._go_to(number)
        model, fault, names = self.prepared.model, "", list[str]()
        self.step.optimizer.zero_grad()
        torch.compiler.set_stance("force_eager")
        try:
            for batch in self._parts():
                names += batch.names(self.prepared.train)
                if not fault or fault.startswith("it did not"):
                    fault = self._fault_of(batch, number, model)
        finally:
            torch.compiler.set_stance("default")
            self.step.optimizer.zero_grad()
        listed = self.run.path / f"nonfinite-step-{number}.txt"
        if self.world.main:
            listed.write_text("\n".join(names) + "\n", encoding="utf-8")
        good = self.snapshots.steps()
        kept = f"the last good checkpoint is that of step {good[0]}" if good else "there was no checkpoint yet"
        return (
            f"A loss or gradient was not finite in step {number} (epoch {epoch}): {fault}. Its {len(names)} images, "
            f"from {names[0]} on, are listed in {listed}; {kept}."
        )

    def _fault_of(self, batch: Batch, number: int, model: torch.nn.Module) -> str:
        if not bool(batch.images.isfinite().all()):
            return "the images themselves hold numbers that are not finite"
        # Alone, every rank looks at its own images and waits for nobody.
        step = self.step

        def compute() -> torch.Tensor:
            seed_part(self.recipe.seed, number, batch.part, self.world.rank)
            with step.runner.accumulating(last=False), autocast(self.precision, self.world.device):
                return self.prepared.task.objective(step.runner, batch.images, batch.targets).sum() / batch.total

        return first_fault(model, compute)

    def _find_micro_batch(self) -> None:
        """On a GPU, try how many images fit before the run begins; all ranks agree on the smallest answer."""
        if self.recipe.micro_batch != "auto" or self.world.device.type != "cuda":
            return
        while not self._fits():
            self._halve_micro_batch(None)
        self._go_to(self.done)

    def _fits(self) -> bool:
        self._go_to(self.done)
        batch = dataclasses.replace(next(self.batches), part=0, parts=2)  # not the last: other ranks are left alone
        failed = False
        try:
            self.step.backward(batch)
        except torch.OutOfMemoryError:
            failed = True
        self.step.optimizer.zero_grad()
        if failed:
            torch.cuda.empty_cache()
        return not self.world.any(failed)

    def _halve_micro_batch(self, error: Exception | None) -> None:
        size = min(self.loader.micro_batch or self.recipe.batch, math.ceil(self.recipe.batch / self.world.ranks))
        config = self.prepared.model.config
        where = f"Out of memory at micro-batch {size} ({config.name}, {config.image_size[0]}×{config.image_size[1]})."
        if size <= 1 or self.recipe.micro_batch != "auto":
            cure = f"--micro-batch {size // 2} or auto" if size > 1 else "a smaller model or image, or --model.recompute -1"
            raise VitrailError(f"{where} Try {cure}; the batch of {self.recipe.batch} stays as it is.") from error
        if error is not None and self.world.ranks > 1:
            raise VitrailError(f"{where} Other ranks cannot be told now; use --micro-batch {size // 2}.") from error
        self.loader.micro_batch = size // 2
        parts = math.ceil(self.recipe.batch / self.world.ranks / self.loader.micro_batch)
        self.say(f"{where} Going on with {self.loader.micro_batch} × {parts}; the batch stays {self.recipe.batch}.")

    def _without_compiling(self, error: Exception) -> None:
        model = self.prepared.model
        if all(part._compiled_call_impl is None for part in (model, *blocks_of(model))):
            raise error
        for part in (model, *blocks_of(model)):
            part._compiled_call_impl = None
        self.say(f"warning: torch.compile failed ({type(error).__name__}); going on without it, more slowly")

    # Talking

    def say(self, text: str) -> None:
        self.tell("note", text)

    def tell(self, event: str, what: Any) -> None:
        for listener in self.listeners:
            getattr(listener, event)(what)


class Window:
    """The steps since the last record, and how fast they went."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.fresh = True
        self.restart()
        self.fresh = True

    def restart(self) -> None:
        """Count time from here on."""
        loop = self.loop
        if loop.world.device.type == "cuda":
            torch.cuda.synchronize(loop.world.device)
        self.first, self.fresh = loop.done, False
        loop.clock.restart()
        loop.loader.wait.reset()

    def record(self) -> dict[str, Any]:
        loop = self.loop
        reading = loop.step.read()
        seconds, steps = max(loop.clock.seconds, 1e-9), loop.done - self.first
        images = steps * loop.recipe.batch / seconds
        per_device = images / loop.world.ranks
        speed = {
            "images_per_second": round(images, 3),
            "mfu": round(per_device * training_flops(loop.prepared.model.config) / loop.peak, 5) if loop.peak else None,
            "data_wait": round(loop.loader.wait.share(), 5),
            "memory": memory(loop.world.device),
            "seconds": round(seconds, 4),
        }
        record = {
            "kind": "train",
            "step": loop.done,
            "epoch": round(loop.done / loop.loader.steps, 5),
            "loss": reading.loss,
            "lr": loop.step.rate(loop.done - 1) * loop.recipe.optim.lr,
            "grad_norm": reading.grad_norm,
            "skipped": reading.skipped,
            "speed": speed,
        }
        self.restart()
        return record


def total_steps(recipe: Recipe, per_epoch: int) -> int:
    """Optimiser steps of the whole run."""
    if recipe.steps is not None:
        return recipe.steps
    if recipe.epochs is None:
        raise VitrailError("How long to train is not said: give --epochs or --steps.")
    return max(1, round(recipe.epochs * per_epoch))


def first_micro_batch(recipe: Recipe, world: World) -> int:
    """Where to begin: the rank's whole share, if that is not absurdly much for a processor."""
    share = math.ceil(recipe.batch / world.ranks)
    if recipe.micro_batch != "auto":
        return min(int(recipe.micro_batch), share)
    return share if world.device.type == "cuda" else min(share, 256)
