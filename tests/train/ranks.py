"""What a rank of the parallel tests does: several small runs, one after the other, in one process group."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.train.processes import run_ranks
from tests.train.small import small, train
from tests.train.test_capture import StandIn
from tests.train.test_masked_runs import TASKS, recipe_of
from vitrail.data.augment.spec import Augment
from vitrail.data.batch import Batch
from vitrail.errors import VitrailError
from vitrail.train import CapturedStep, best_checkpoint
from vitrail.train import parallel as parallel_engines
from vitrail.train.config import ModelSpec, Recipe, TaskSpec
from vitrail.train.loop import Loop
from vitrail.train.parallel import joined
from vitrail.train.prepare import Prepared, prepare
from vitrail.train.shards import whole
from vitrail.train.step import Step


class Enough(Exception):
    """Stands in for a crash."""


# A large epsilon: Adam otherwise blows rounding errors in small gradients up to whole steps.
ADAM = {"optim__name": "adamw", "optim__lr": 1e-3, "optim__eps": 1e-2, "optim__weight_decay": 0.1}


# Blocks stay gathered, and the averaged weights are evaluated in between.
KEPT = {"ema": 0.5, "eval_every": 0.02, "checkpoint_every": 100, "keep_best": "loss"}

# One micro-batch per step, which is captured with a stand-in for the graph.
CAPTURED = {**KEPT, "micro_batch": 15}


# Whole blocks, and some parameters of the others.
FROZEN = {
    **ADAM,
    "optim__freeze": ("patches", "blocks.0", "*.norm?"),
    "optim__lr_scale": ("head=3",),
    "optim__weight_decay_for": ("head=0.5",),
    "ema": 0.5,
}


def run_of(parallel: str = "auto", **changes: object) -> Recipe:
    """30 images over 2 or 3 ranks, in uneven micro-batches, without chance inside the model."""
    return small(
        **{
            "parallel": parallel,
            "batch": 30,
            "micro_batch": 8,
            "steps": 5,
            "augment": Augment(crop_area=(0.7, 1.0), flip=0.0, mixup=0.2),
            "optim__name": "sgd",
            "optim__lr": 0.1,
            "model__dropout": 0.0,
            "model__stochastic_depth": 0.0,
            **changes,
        }
    )


def distilling(out: Path, parallel: str = "auto") -> Recipe:
    return run_of(parallel, task=TaskSpec(distill="hard", teacher=str(out / "teacher")), model__distill_token=True)


@contextmanager
def higher_is_better() -> Iterator[None]:
    """Let the highest loss be the best: so it is not the last, and must be restored."""
    before, best_checkpoint.lower_is_better = best_checkpoint.lower_is_better, lambda metric: False
    try:
        yield
    finally:
        best_checkpoint.lower_is_better = before


def crash_at(step: int) -> None:
    original = Loop._next_step

    def crash(self: Loop) -> None:
        if self.done == step:
            self.snapshots.finish()
            raise Enough
        original(self)

    Loop._next_step = crash  # type: ignore[method-assign]
    Loop._whole = original  # type: ignore[attr-defined]


def captured(step: Step) -> CapturedStep:
    """What a step makes on a GPU."""
    parameters = list(step.optimizer.parameters)
    return CapturedStep(
        lambda images, targets: step._backward(images, targets, step.recipe.batch),
        parameters,
        warmup=1,
        any_rank=step.world.any,
        captures_shards=True,
        new_graph=lambda: StandIn(parameters),
    )


class NonFinite:
    """Corrupts the outputs of a layer on one rank, from a forward pass in training on and for so many of them."""

    def __init__(self, prepared: Prepared, first: int, passes: int, rank: int) -> None:
        self.bad, self.rank, self.number = range(first, first + passes), rank, -1
        prepared.model.register_forward_pre_hook(self._count)
        prepared.model.blocks[1].mlp.register_forward_hook(self._corrupt)

    def _count(self, module: nn.Module, inputs: object) -> None:
        self.number += module.training

    def _corrupt(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        here = dist.get_rank() == self.rank if dist.is_initialized() else self.rank == 0
        return output * float("nan") if here and module.training and self.number in self.bad else output


@contextmanager
def nonfinite_images(step: int, rank: int) -> Iterator[None]:
    """Let one rank get images that are not finite, whenever this step is taken."""
    original = Loop.micro_batches

    def corrupted(self: Loop) -> Iterator[Batch]:
        for batch in original(self):
            if batch.step == step and dist.get_rank() == rank:
                batch.images[0] = float("nan")
            yield batch

    Loop.micro_batches = corrupted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Loop.micro_batches = original  # type: ignore[method-assign]


def nonfinite(out: Path) -> None:
    """One rank's gradient is not finite in its fourth step, of two micro-batches; all ranks must explain that together."""
    for parallel in ("ddp", "fsdp"):
        recipe = run_of(parallel)
        prepared = prepare(recipe, on_meta=parallel == "fsdp")
        NonFinite(prepared, first=6, passes=100, rank=1)
        try:
            train(recipe, out / f"stopped-{parallel}", prepared=prepared)
        except VitrailError as error:
            assert "first in blocks.1.mlp (its input reaches" in str(error), error
            assert "step 3" in str(error) and "Its 30 images" in str(error), error
        else:
            raise AssertionError("did not stop")
        recipe = run_of(parallel, on_nonfinite="rollback")
        prepared = prepare(recipe, on_meta=parallel == "fsdp")
        NonFinite(prepared, first=6, passes=1, rank=1)
        train(recipe, out / f"rolled-back-{parallel}", prepared=prepared)
        # A model with a buffer, which DDP sends in forward passes: the first rank runs none on images that are not finite.
        try:
            with nonfinite_images(step=3, rank=0):
                train(run_of(parallel, model__position="sincos2d"), out / f"images-{parallel}")
        except VitrailError as error:
            assert "the images themselves hold numbers that are not finite" in str(error), error
        else:
            raise AssertionError("did not stop")


FRESH = {
    "learned": {},
    "sincos": {"model__position": "sincos2d", "model__pooling": "map"},
    "small": {"model__init": "small", "model__registers": 2},
    "hybrid": {
        "model": ModelSpec(name="R+ViT-Ti/16", image_size=32, channels=1, width=32, depth=2, heads=1, mlp=48, layer_scale=0.1)
    },
}


def initial_values() -> None:
    """Sharded models begin with the values of unsharded ones, bit for bit."""
    recipes = [run_of("fsdp", **changes) for changes in FRESH.values()]
    recipes += [recipe_of(TASKS[name], parallel="fsdp") for name in ("mean-colour", "mae")]
    for recipe in recipes:
        loop = Loop.__new__(Loop)
        with joined(recipe.device, recipe.parallel) as world:
            loop.recipe, loop.world, loop.precision, loop.total = recipe, world, "fp32", 1
            loop.schedule = recipe.schedule
            loop.prepared = prepare(recipe, on_meta=True)
            assert all(one.is_meta for one in loop.prepared.trained.parameters())
            model = loop._make_step().runner.model
            whole_model = prepare(recipe).trained
            ours = dict(model.named_parameters()) | dict(model.named_buffers())
            theirs = dict(whole_model.named_parameters()) | dict(whole_model.named_buffers())
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                assert torch.equal(whole(ours[name]).detach(), value), (recipe.model.name, name)
                if name in dict(whole_model.named_parameters()) and len(value) > 1:
                    assert ours[name].to_local().numel() < value.numel(), name


def begin(out: Path) -> None:
    """On two ranks: whole runs by every engine, and two that are cut off."""
    initial_values()
    nonfinite(out)
    for parallel in ("ddp", "fsdp", "hybrid"):
        train(run_of(parallel), out / parallel)
    train(run_of("fsdp", **ADAM), out / "fsdp-adam")
    for parallel in ("ddp", "fsdp"):
        train(run_of(parallel, **FROZEN), out / f"{parallel}-frozen")
    parallel_engines.fits_gathered, decided = (lambda *_: True), parallel_engines.fits_gathered
    with higher_is_better():
        train(run_of("fsdp", **KEPT), out / "fsdp-kept")
    Step._make_captured, ordinary = captured, Step._make_captured  # type: ignore[method-assign]
    train(run_of("fsdp", **CAPTURED), out / "fsdp-captured")
    Step._make_captured = ordinary  # type: ignore[method-assign]
    parallel_engines.fits_gathered = decided
    train(run_of("ddp", **{**KEPT, "patience": 1, "min_improvement": 9.0}), out / "ddp-stopped")
    train(distilling(out, "fsdp"), out / "distilled")
    crash_at(4)
    for parallel in ("ddp", "fsdp"):
        try:
            train(run_of(parallel), out / f"cut-{parallel}")
        except Enough:
            dist.barrier()


def go_on(out: Path) -> None:
    """On three ranks: the run that was cut off."""
    train(run_of("ddp"), out / "cut-ddp-3")
    train(run_of("fsdp"), out / "cut-fsdp-3")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_ranks(2, begin, folder, on_one_machine=False)
    for engine in ("ddp", "fsdp"):
        for ranks in (1, 3):
            shutil.copytree(folder / f"cut-{engine}", folder / f"cut-{engine}-{ranks}")
    run_ranks(3, go_on, folder, on_one_machine=False)
