"""A training step on the CPU, in fp32 and in bf16, against timm's model in eager mode.

Forward, cross-entropy, backward and fused AdamW on the same random images, in alternating rounds. What counts is the process's CPU
time with one thread, which other processes on the machine disturb little; wall-clock time is written too.

    python benchmarks/cpu_training.py --batch 16 --rounds 10     # ViT-S/16, some minutes
    python benchmarks/cpu_training.py --tiny                     # does everything run?

Prints a table and writes benchmarks/results/cpu-training-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vitrail.bench import baselines
from vitrail.bench.machine import hardware, versions
from vitrail.models import create_model, flops, model_config
from vitrail.train.precision import autocast, chosen_precision

CPU = torch.device("cpu")


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = model_config(options.model, **({"image_size": 32, "depth": 2} if options.tiny else {}))
    images = torch.randn(options.batch, 3, *config.image_size)
    targets = torch.randint(config.outputs, (options.batch,))
    auto = chosen_precision("auto", CPU, flops(config))
    fields = {"image_size": config.image_size, "depth": config.depth}
    steps = {
        ("vitrail", one): stepper(create_model(options.model, seed=0, **fields), images, targets, one) for one in ("fp32", "bf16")
    }
    if not baselines.missing("timm"):
        steps = {("timm", one): stepper(baselines.build("timm", config), images, targets, one) for one in ("fp32", "bf16")} | steps
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in steps}
    for number in range(options.rounds + 1):
        for key, step in steps.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            if number:  # the first round allocates and chooses kernels
                seconds[key].append((time.process_time() - cpu, time.perf_counter() - wall))
    first = min(cpu for cpu, _ in seconds[next(iter(steps))])
    rows = []
    for (library, precision), values in seconds.items():
        best = min(cpu for cpu, _ in values)
        mode = "eager, auto" if library == "vitrail" and precision == auto else "eager"
        rows.append(
            {
                "model": options.model,
                "batch": options.batch,
                "library": library,
                "mode": mode,
                "precision": precision,
                "cpu_seconds": round(best, 4),
                "wall_seconds": round(min(wall for _, wall in values), 4),
                "speedup": round(first / best, 3),
            }
        )
        print(f"{library:<8} {precision}  {mode:<12} {best:8.3f} s CPU time  {first / best:6.2f} ×")
    if not options.tiny:
        write(rows, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="two blocks, small images, no results written")
    options = parser.parse_args()
    if options.tiny:
        options.batch, options.rounds = 2, 2
    return options


def stepper(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, precision: str) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with autocast(precision, CPU):
            logits = model(images)
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    about = {"hardware": hardware(CPU), **versions()}
    name = f"{options.model.lower().removeprefix('vit-').replace('/', '-')}-batch{options.batch}"
    file = Path(__file__).parent / "results" / f"cpu-training-{name}-torch{str(torch.__version__).split('+')[0]}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
