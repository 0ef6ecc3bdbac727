"""Training steps on one GPU, in every mode of this package.

Forward, cross-entropy, backward and fused AdamW in bf16 on random images that lie on the device:

    loop            the training loop's step, captured as a CUDA graph
    loop, uncaptured
    ddp             DistributedDataParallel over NCCL, world size 1, captured with its all-reduces
    ddp, uncaptured
    fsdp            FSDP2, every block a unit, captured with its gathering and scattering
    fsdp, uncaptured
    fsdp, plain     captured, without the fused kernels
    own loop, captured      a loop of one's own with `vitrail.train.capture`
    own loop
    timm, compiled          timm's model in that loop under torch.compile, if timm is installed

All are built for a model at the same time and run in alternating rounds, each after a warm-up in which it compiles and captures;
the median over rounds counts. A captured step is dropped at the end of its round, so that ViT-L/16 fits.

    python benchmarks/parallel.py                         # S/16, B/16, L/16, batch 256: about eight minutes on an H200
    python benchmarks/parallel.py --models ViT-S/16 --rounds 9
    torchrun --nproc-per-node 1 benchmarks/parallel.py    # the same
    python benchmarks/parallel.py --tiny                  # on any machine, over gloo: does everything run?

Prints a table and writes benchmarks/results/parallel-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.bench import baselines
from vitrail.bench.machine import hardware, versions
from vitrail.data.batch import Batch
from vitrail.models import ModelConfig, build_model, model_config
from vitrail.tasks import Classify
from vitrail.train import capture
from vitrail.train.config import OptimSpec, Recipe, ScheduleSpec
from vitrail.train.optimizers import Optimizer
from vitrail.train.parallel import Mode, Runner, World, choose_device
from vitrail.train.precision import autocast, shard_dtype
from vitrail.train.step import Step

PRECISION = "bf16"
OPTIM = OptimSpec(name="adamw", lr=1e-5, weight_decay=0.1, clip=None)
WARMUP = 14  # DDP is captured after 11


class Entry:
    """A mode of one model: its name, a step that returns its loss, and what to drop at the end of a round.

    `describe` tells whether the step is captured, or why not.
    """

    def __init__(self, name: str, step: Callable[[], Tensor], drop: Callable[[], None], describe: Callable[[], str]) -> None:
        self.name, self.step, self.drop, self.describe = name, step, drop, describe
        self.seconds: list[float] = []
        self.loss, self.note = math.nan, ""

    def run_round(self, steps: int, device: torch.device) -> None:
        for _ in range(WARMUP):
            self.step()
        settle(device)
        began = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        settle(device)
        self.seconds.append((time.perf_counter() - began) / steps)
        self.loss, self.note = float(loss), self.describe()
        if not math.isfinite(self.loss):
            raise SystemExit(f"{self.name}: the loss is {self.loss}")
        self.drop()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    options = parse()
    device = choose_device("cpu" if options.tiny else "auto")
    if options.tiny:
        torch.set_num_threads(1)
    join(device)
    rows: list[dict[str, Any]] = []
    try:
        for name in options.models:
            rows += compare(name, options, device)
    finally:
        dist.destroy_process_group()
    write(rows, options, device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-S/16", "ViT-B/16", "ViT-L/16"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="only modes whose name begins with one of these words")
    parser.add_argument("--captured", action="store_true", help="leave out modes that are not captured, and those without kernels")
    parser.add_argument("--tiny", action="store_true", help="two small blocks on the CPU, few steps, no results written")
    options = parser.parse_args()
    if options.tiny:
        options.models, options.batch, options.steps, options.rounds = ["ViT-Ti/16"], 4, 2, 2
    return options


def join(device: torch.device) -> None:
    """A process group of one, unless torchrun has prepared one."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    if dist.get_world_size() != 1:
        raise SystemExit("This benchmark compares modes on one device; start one process.")


def compare(name: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    small = {"image_size": 32, "depth": 2, "outputs": 10} if options.tiny else {}
    config = model_config(name, **small)
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(options.batch, config.channels, *config.image_size, device=device, generator=generator)
    targets = torch.randint(config.outputs, (options.batch,), device=device, generator=generator)
    chosen = [
        (kind, make)
        for kind, make in MODES.items()
        if (not options.only or kind.split(",")[0].split()[0] in options.only or kind in options.only)
        and not (options.captured and kind.endswith(("uncaptured", "plain")))
    ]
    entries = [make(kind, config, images, targets) for kind, make in chosen if not missing(kind)]
    for number in range(options.rounds):
        for entry in entries if number % 2 == 0 else reversed(entries):
            entry.run_round(options.steps, device)
            print(f"{name}  round {number + 1}  {entry.name:<20} {entry.seconds[-1] * 1e3:8.2f} ms  {entry.note}", flush=True)
    medians = {entry.name: statistics.median(entry.seconds) for entry in entries}
    rows = []
    for entry in entries:
        row = {
            "model": name,
            "batch": options.batch,
            "precision": PRECISION,
            "mode": entry.name,
            "ms": round(medians[entry.name] * 1e3, 3),
            "fastest_ms": round(min(entry.seconds) * 1e3, 3),
            "images_per_second": round(options.batch / medians[entry.name], 1),
            "of_loop": round(medians["loop"] / medians[entry.name], 4) if "loop" in medians else "",
            "of_timm": round(medians["timm, compiled"] / medians[entry.name], 4) if "timm, compiled" in medians else "",
            "loss": round(entry.loss, 4),
            "note": entry.note,
        }
        rows.append(row)
    for entry in entries:
        entry.step = entry.drop = entry.describe = None  # type: ignore[assignment]
    del entries
    gc.collect()
    return rows


def missing(kind: str) -> str | None:
    message = baselines.missing("timm") if kind.startswith("timm") else None
    if message:
        print(message, flush=True)
    return message


def engine(mode: Mode, *, captured: bool = True, kernels: str = "auto") -> Callable[..., Entry]:
    """The training loop's own step, under an engine."""

    def make(name: str, config: ModelConfig, images: Tensor, targets: Tensor) -> Entry:
        device = images.device
        model = built(config, device)
        model.kernels = kernels  # type: ignore[assignment]
        world = World(device, mode=mode)
        schedule, task = ScheduleSpec(kind="constant"), Classify(config.outputs)
        recipe = Recipe(optim=OPTIM, schedule=schedule, batch=len(images), on_nonfinite="skip", cuda_graph=captured)
        runner, optimizer = Runner(model, world, param_dtype=shard_dtype(PRECISION, device)), Optimizer(model, OPTIM)
        step = Step(runner, task, optimizer, recipe, total=1, precision=PRECISION, average=None, schedule=schedule)
        batch = Batch(images, targets, torch.arange(len(images)), 0, 0, 0, 1, len(images))
        failure = [""]  # kept when the capture is reset

        def take() -> Tensor:
            step.take([batch], 0)
            return step._loss / max(step._steps, 1)

        def drop() -> None:
            reading = step.read()
            if reading.skipped:
                raise SystemExit(f"{name}: {reading.skipped} steps had gradients that were not finite")
            step.reset_capture()

        def describe() -> str:
            reason = step.why_not_captured()
            failure[0] = f"not captured: {reason}" if reason else failure[0]
            running = step._captured is not None and step._captured.captured
            return failure[0] or ("captured" if running else "")

        return Entry(name, take, drop, describe)

    return make


def own_loop(kind: str) -> Callable[..., Entry]:
    """A loop as a reader of the documentation would write it."""

    def make(name: str, config: ModelConfig, images: Tensor, targets: Tensor) -> Entry:
        device = images.device
        model = built(config, device) if kind != "timm" else timm_model(config, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, fused=True)

        def backward(images: Tensor, targets: Tensor) -> Tensor:
            with autocast(PRECISION, device):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), targets)
            loss.backward()
            return loss.detach()

        step = capture(backward, model.parameters()) if kind == "captured" else None

        def take() -> Tensor:
            loss: Tensor = (step or backward)(images, targets)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def drop() -> None:
            if step is not None:
                step.reset()

        def describe() -> str:
            if step is None:
                return ""
            return f"not captured: {step.failure}" if step.failure else "captured" * step.captured

        return Entry(name, take, drop, describe)

    return make


def built(config: ModelConfig, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(config, device=device).train()
    nn.init.trunc_normal_(model.head.weight, std=0.02)  # multiplying zeros draws less power, and so is faster
    return model


def timm_model(config: ModelConfig, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        model = baselines.build("timm", config)
    nn.init.trunc_normal_(model.head.weight, std=0.02)  # type: ignore[union-attr, arg-type]
    model.to(device).train()
    model.compile(dynamic=False)
    return model


MODES: dict[str, Callable[..., Entry]] = {
    "loop": engine("single"),
    "loop, uncaptured": engine("single", captured=False),
    "ddp": engine("ddp"),
    "ddp, uncaptured": engine("ddp", captured=False),
    "fsdp": engine("fsdp"),
    "fsdp, uncaptured": engine("fsdp", captured=False),
    "fsdp, plain": engine("fsdp", kernels="plain"),
    "own loop, captured": own_loop("captured"),
    "own loop": own_loop("plain"),
    "timm, compiled": own_loop("timm"),
}


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(rows: list[dict[str, Any]], options: argparse.Namespace, device: torch.device) -> None:
    print()
    for row in rows:
        print(
            f"{row['model']:<10} {row['mode']:<20} {row['ms']:>9.2f} ms {row['images_per_second']:>10.1f} images/s  "
            f"{row['of_loop'] or '':>7} of loop  {row['of_timm'] or '':>7} of timm  {row['note']}"
        )
    if options.tiny:
        return
    about = {"hardware": hardware(device), "threads": torch.get_num_threads(), **versions()}
    name = about["hardware"].lower().replace(" ", "-").replace(",", "")
    file = Path(__file__).parent / "results" / f"parallel-{name}-torch{str(torch.__version__).split('+')[0]}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    measured = {row["model"] for row in rows}
    before = list(csv.DictReader(file.open(encoding="utf-8"))) if file.exists() else []
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in before if row["model"] not in measured)  # other models' rows stay
        writer.writerows({**row, **about} for row in rows)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
