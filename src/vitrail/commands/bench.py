"""`vitrail bench`: how fast this machine trains and runs a model, against other libraries and its own limit."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from typing import Annotated

import tyro
from rich.console import Console

from vitrail.bench import BenchPlan, run
from vitrail.commands.bench_table import as_json, console_for_tables, show
from vitrail.commands.options import Json

Plan = Annotated[BenchPlan, tyro.conf.arg(name="")]
DEFAULT = BenchPlan()


def bench(*, plan: Plan = DEFAULT, json_: Json = False) -> None:
    """Measure training or inference: images a second, share of the machine's matrix ceiling, memory, against other libraries.

    All do the same work on the same random images, and take turns. What a peer needs to be installed is said.

    Example: vitrail bench --model B/16 L/16 --mode train --against timm torchvision hf --out bench

    Example: vitrail bench --model B/16 --latency

    Example: vitrail bench --model Ti/16 --mode infer --device cpu --modes vitrail:default timm:eager

    Args:
        plan: What to measure.
        json_: Print JSON for a program instead of tables.
    """
    aside = Console(stderr=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn about their own future; it has no bearing on the figures
        rows = run(plan, say=lambda words: aside.print(words, style="dim", highlight=False, soft_wrap=True), command=command())
    if json_:
        print(json.dumps(as_json(rows), indent=2))  # noqa: T201
        return
    console = console_for_tables()
    show(rows, console)
    written = [name for name in ("bench.csv", "bench.png") if plan.out is not None and (plan.out / name).exists()]
    if not rows:
        console.print("Nothing was measured.")
    elif written:
        console.print(f"\nwritten to {plan.out}: {' and '.join(written)}", highlight=False, soft_wrap=True)


def command() -> str:
    """The command line that is running, for the record."""
    return shlex.join(["vitrail", *sys.argv[1:]])
