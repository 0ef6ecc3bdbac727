"""What a rank of the parallel test of learning without labels does."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.train.processes import run_ranks
from tests.train.small import train
from tests.train.test_masked_runs import TASKS, of_the_image, recipe_of
from vitrail.tasks.masked import Masked
from vitrail.train.config import Recipe


def run_of(name: str, parallel: str = "auto") -> Recipe:
    """30 images over 2 ranks in uneven micro-batches; batch 30 of 1,295 images leaves the ranks uneven in validation too."""
    settings = {
        "steps": 4,
        "batch": 30,
        "micro_batch": 8,
        "ema": 0.9,
        "schedule__warmup": 1,
        "optim__name": "sgd",
        "optim__lr": 0.1,
    }
    return recipe_of(TASKS[name], parallel=parallel, **settings)


def main(out: Path) -> None:
    for parallel in ("ddp", "fsdp"):
        train(run_of("mean-colour", parallel), out / f"colour-{parallel}")
    Masked.draw = of_the_image  # type: ignore[method-assign]
    for parallel in ("ddp", "fsdp"):
        train(run_of("mae", parallel), out / f"mae-{parallel}")


if __name__ == "__main__":
    run_ranks(2, main, Path(sys.argv[1]))
