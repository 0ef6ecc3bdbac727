"""`vitrail bench`: benchmark training and inference against other libraries and the matmul peak."""

from __future__ import annotations

import shlex
import sys
import warnings
from typing import Annotated

import tyro

from vitrail.bench import BenchPlan
from vitrail.commands.bench_table import as_json, console_for_tables, show
from vitrail.commands.options import Json
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.text import to_json

Plan = Annotated[BenchPlan, tyro.conf.arg(name="")]
DEFAULT = BenchPlan()


def bench(*, plan: Plan = DEFAULT, json_: Json = False) -> None:
    """Benchmark training or inference: images/s, fraction of the measured matmul peak, memory, compared with other libraries.

    All libraries do the same work on the same random images, in alternating rounds. Libraries that are not installed are skipped.

    Example: vitrail bench --model B/16 L/16 --task train --against timm torchvision hf --out bench

    Example: vitrail bench --model B/16 --latency

    Example: vitrail bench --model Ti/16 --task infer --device cpu --mode vitrail:default timm:eager

    Args:
        plan: What to measure.
        json_: Print JSON instead of tables.
    """
    from vitrail.bench import run

    if plan.out is not None:
        check_place(plan.out)
    stderr = Console(stderr=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings of the other libraries
        rows = run(plan, log=lambda message: stderr.print(message, style="dim", highlight=False, soft_wrap=True), command=command())
    if json_:
        say(to_json(as_json(rows), indent=2))
        return
    console = console_for_tables()
    show(rows, console)
    written = [name for name in ("bench.csv", "bench.png") if plan.out is not None and (plan.out / name).exists()]
    if not rows:
        console.print("Nothing was measured.")
    elif written:
        console.print(f"\nwritten to {plan.out}: {' and '.join(written)}", highlight=False, soft_wrap=True)


def command() -> str:
    """Return the command line, to be stored with the results."""
    return shlex.join(["vitrail", *sys.argv[1:]])
