"""What a rank of the parallel tests does: several small runs, one after the other, in one process group."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from tests.train.small import small
from vitrail.data.augment.spec import Augment
from vitrail.train.config import Recipe, TaskSpec
from vitrail.train.loop import Loop, train


class Enough(Exception):
    """Stands for a crash."""


# A large epsilon: Adam otherwise blows rounding errors in small gradients up to whole steps.
ADAM = {"optim__name": "adamw", "optim__lr": 1e-3, "optim__eps": 1e-2, "optim__weight_decay": 0.1}


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
    return run_of(parallel, task=TaskSpec(distil="hard", teacher=str(out / "teacher")), model__distill_token=True)


def crash_at(step: int) -> None:
    original = Loop._next_step

    def crash(self: Loop) -> None:
        if self.done == step:
            self.snapshots.finish()
            raise Enough
        original(self)

    Loop._next_step = crash  # type: ignore[method-assign]
    Loop._whole = original  # type: ignore[attr-defined]


def begin(out: Path) -> None:
    """On two ranks: whole runs by every engine, and two that are cut off."""
    for parallel in ("ddp", "fsdp", "hybrid"):
        train(run_of(parallel), out / parallel)
    train(run_of("fsdp", **ADAM), out / "fsdp-adam")
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
    dist.init_process_group("gloo")
    {"begin": begin, "go_on": go_on}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()
