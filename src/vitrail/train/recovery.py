"""Recovery from errors in a step: non-finite numbers, too little memory, a compiler that fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.errors import VitrailError, counted
from vitrail.text import to_bytes
from vitrail.train.nonfinite import NOT_AGAIN, Diverged, advice, earliest_fault, first_fault
from vitrail.train.parallel import Forward, World, blocks_of
from vitrail.train.precision import autocast
from vitrail.train.step import seed_micro_batch

if TYPE_CHECKING:
    from vitrail.train.loop import Loop

_ROLLBACKS = 5


def handle_nonfinite(loop: Loop) -> bool:
    """Handle a non-finite gradient; return True if the run went back to a checkpoint."""
    bad = loop.step.first_bad()
    if bad is None:
        return False
    policy = loop.recipe.on_nonfinite
    if policy == "skip":
        loop.say(f"warning: the gradient of step {bad} was not finite; the step was skipped")
        loop.step.clear_bad()
        return False
    explained = _explain(loop, bad)
    if policy == "stop" or loop.rollbacks >= _ROLLBACKS:
        raise Diverged(f"{explained} {advice(loop.precision, loop.recipe.optim.lr, policy)}")
    loop.rollbacks += 1
    state = loop.snapshots.load(loop.step.tensors())
    if state is None:
        raise Diverged(
            f"{explained} There is no valid checkpoint to return to. {advice(loop.precision, loop.recipe.optim.lr, policy)}"
        )
    loop.return_to(state)
    loop.skipped_steps.add(bad)
    loop.say(f"warning: {explained} Back to step {loop.done}; step {bad} will be skipped.")
    return True


def refuse_to_save(loop: Loop, name: str) -> None:
    """Do not save weights that are not finite. With `rollback` the next step finds the same, and returns to a good checkpoint."""
    loop.snapshots.finish()
    good = loop.snapshots.steps()
    kept = f"the last good one is that of step {good[0]}" if good else "there is none before it"
    text = f"The weight {name} is not finite after step {loop.done}. This checkpoint was not saved; {kept}."
    if loop.recipe.on_nonfinite != "rollback" or loop.done == loop.total:
        raise Diverged(f"{text} {advice(loop.precision, loop.recipe.optim.lr, loop.recipe.on_nonfinite)}")
    loop.say(f"warning: {text}")


def _explain(loop: Loop, number: int) -> str:
    """Repeat the step with hooks on every layer. The weights have not changed since."""
    loop.snapshots.finish()
    loop.go_to(number)
    fault, names = NOT_AGAIN, list[str]()
    loop.step.optimizer.zero_grad()
    loop.step.runner.reshard()
    try:
        with torch.compiler.set_stance("force_eager"):
            for batch in loop.micro_batches():
                names += batch.names(loop.prepared.train)
                if loop.world.sharded or fault == NOT_AGAIN:  # FSDP2 communicates: no rank may leave out what another computes
                    fault = earliest_fault((fault, _fault_of(loop, batch, number)))
    finally:
        loop.step.optimizer.zero_grad()
    found = loop.world.gather((fault, names))
    fault = earliest_fault(one for one, _ in found)
    names = [name for _, some in found for name in some]
    listed = loop.run.path / f"nonfinite-step-{number}.txt"
    if loop.world.main:
        listed.write_bytes(to_bytes("\n".join(names) + "\n"))
    good = loop.snapshots.steps()
    kept = f"the last good checkpoint is that of step {good[0]}" if good else "there was no checkpoint yet"
    return (
        f"A loss or gradient was not finite in step {number} (epoch {number // loop.loader.steps}): {fault}. "
        f"Its {counted(len(names), 'image')}, from {names[0]} on, {'is' if len(names) == 1 else 'are'} listed in {listed}; {kept}."
    )


def _fault_of(loop: Loop, batch: Batch, number: int) -> str:
    finite, sharded = bool(batch.images.isfinite().all()), loop.world.sharded
    runner = loop.step.runner
    # Under DDP every rank checks its own images, and some may have none to run. So not through DDP: it sends buffers in forward.
    model = runner if sharded else Forward(runner.model)

    def compute() -> Tensor:
        seed_micro_batch(loop.recipe.seed, number, batch.micro_step, loop.world)
        with runner.accumulating(last=True), autocast(loop.precision, loop.world.device):
            return loop.prepared.task.objective(model, batch.images, batch.targets).sum() / batch.total

    fault = first_fault(loop.prepared.trained, compute, computes_all=sharded) if finite or sharded else ""
    return fault if finite else "the images themselves hold numbers that are not finite"


def find_micro_batch(loop: Loop) -> None:
    """On a GPU, find the micro-batch that fits before the first step; all ranks use the smallest."""
    if loop.recipe.micro_batch != "auto" or loop.world.device.type != "cuda":
        return
    while not _fits(loop):
        halve_micro_batch(loop, None)
    loop.go_to(loop.done)


def _fits(loop: Loop) -> bool:
    loop.go_to(loop.done)
    # Not the last of its step: DDP then communicates nothing. FSDP2 gathers weights in any case.
    batch = dataclasses.replace(next(loop.batches), micro_step=0, micro_steps=2)
    failed = False
    with _equal_memory(loop.world):
        try:
            loop.step.backward(batch)
        except torch.OutOfMemoryError:
            failed = True
    loop.step.optimizer.zero_grad()
    if _any_failed(loop, failed):
        loop.step.runner.renew()
        if failed:
            torch.cuda.empty_cache()
        return False
    _drop_gradients(loop, batch)
    return True


@contextmanager
def _equal_memory(world: World) -> Iterator[None]:
    """Under FSDP2 let no rank use more memory than the one with the least, so that all run out of it at the same place.

    A rank that stops alone would leave the others waiting for its shards.
    """
    if not world.sharded or world.ranks == 1 or world.device.type != "cuda":
        yield
        return
    free, total = torch.cuda.mem_get_info(world.device)
    least = min(world.gather(free + torch.cuda.memory_reserved(world.device)))
    torch.cuda.set_per_process_memory_fraction(min(least / total, 1.0), world.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, world.device)


def _any_failed(loop: Loop, failed: bool) -> bool:
    """Whether the trial failed; under FSDP2 on all ranks or on none."""
    world = loop.world
    if not world.sharded:
        return world.any(failed)
    failures = world.gather(failed)  # over the CPU: GPUs may be waiting for a rank that stopped
    if any(failures) and not all(failures):
        number, size = failures.index(True), loop.micro_batch
        raise VitrailError(
            f"Rank {number} ran out of memory at micro-batch {size}, others did not, and cannot continue without its shards. "
            f"Use --micro-batch {max(size // 2, 1)}, or end other programs on that GPU."
        )
    return failures[0]  # type: ignore[no-any-return]


def _drop_gradients(loop: Loop, batch: Batch) -> None:
    """Drop the gradients of a trial. Those not yet summed over ranks FSDP2 keeps where `zero_grad` does not reach them, and adds
    them to the next step's: so sum them now, with those of one image."""
    if loop.world.sharded:
        one = {name: getattr(batch, name)[:1] for name in ("images", "targets", "indices")}
        loop.step.backward(dataclasses.replace(batch, micro_step=0, micro_steps=1, **one))
        loop.step.optimizer.zero_grad()


def halve_micro_batch(loop: Loop, error: Exception | None) -> None:
    """Halve the micro-batch: the step stays the same. `error` is what ended a step, if one did."""
    recipe, config, size = loop.recipe, loop.prepared.model.config, loop.micro_batch
    where = f"Out of memory at micro-batch {size} ({config.name}, {config.image_size[0]}×{config.image_size[1]})."
    if size <= 1 or recipe.micro_batch != "auto":
        cure = f"--micro-batch {size // 2} or auto" if size > 1 else "a smaller model or image, or --model.recompute -1"
        raise VitrailError(f"{where} Try {cure}; the batch of {recipe.batch} stays as it is.") from error
    if error is not None and loop.world.ranks > 1:
        raise VitrailError(f"{where} The other ranks cannot follow now; use --micro-batch {size // 2}.") from error
    loop.set_micro_batch(size // 2)
    parts = math.ceil(recipe.batch / loop.world.ranks / loop.micro_batch)
    loop.say(f"{where} Now {loop.micro_batch} × {parts}; the batch stays {recipe.batch}.")


def without_compiling(loop: Loop, error: Exception) -> None:
    """Stop compiling; an error with another cause is raised again."""
    parts = (loop.prepared.trained, *blocks_of(loop.prepared.trained))
    if all(part._compiled_call_impl is None for part in parts):
        raise error
    for part in parts:
        vars(part).pop("_compiled_call_impl", None)  # setting it to None would look like a patched call, which is not fused
    loop.say(f"warning: torch.compile failed ({type(error).__name__}); training continues without it, more slowly")
