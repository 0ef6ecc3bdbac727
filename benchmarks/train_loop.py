"""What the training loop costs, and whether plans tell the truth.

1. ViT-S/16 on resident data: the bare step (forward, backward, optimiser) against the loop with clipping, averaging, the guard
   against non-finite numbers and logging, in alternating rounds. The loop should add less than 2 %.
2. The MFU in the loop's own records against one counted by hand here.
3. The memory of `vitrail plan` against what torch really held, for ViT-B/16 and ViT-L/16.

    python benchmarks/train_loop.py              # on a GPU, about two minutes
    python benchmarks/train_loop.py --compile    # the same with torch.compile
    python benchmarks/train_loop.py --tiny       # on any machine: does everything run?

Prints a table and writes benchmarks/results/train-loop-….csv with hardware and versions.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.data.augment.spec import Augment
from vitrail.data.batch import Batch
from vitrail.data.preprocess import preset
from vitrail.data.types import Payload, Split
from vitrail.models import Model, create_model
from vitrail.tasks import Classify
from vitrail.train.callbacks import Callback, Record
from vitrail.train.captured_step import capture
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec
from vitrail.train.loop import Loop
from vitrail.train.parallel import World, choose_device
from vitrail.train.plan import make_plan
from vitrail.train.precision import chosen_precision
from vitrail.train.prepare import Prepared
from vitrail.train.result import Result
from vitrail.train.run import RunFolder
from vitrail.train.speed import peak_flops
from vitrail.train.stopping import Stop

Row = dict[str, Any]


def main() -> None:
    options = parse()
    device = choose_device("auto")
    torch.manual_seed(0)
    rows = overhead(options, device)
    rows += planned_memory(options, device)
    report(rows, options, device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small models, few steps, no results written")
    return parser.parse_args()


class OneImage(Split):
    """A split that exists only as a number of images; its batches come from `Resident`."""

    def __init__(self, count: int, classes: int) -> None:
        self.name, self.task, self.classes = "train", "classify", tuple(map(str, range(classes)))
        self.targets = np.zeros(count, np.int64)

    def image_name(self, index: int) -> str:
        return str(index)

    def payload(self, index: int) -> Payload:
        return np.zeros((8, 8, 3), np.uint8)


class Resident:
    """Stands in for the loader: always the same batch, already on the device."""

    def __init__(self, loader: Any, images: torch.Tensor, targets: torch.Tensor) -> None:
        self.steps, self.note, self.bad, self.data_wait, self.workers = loader.steps, "", {}, loader.data_wait, 0
        self._batch = Batch(images, targets, torch.arange(len(images)), 0, 0, 0, 1, len(images))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            started = self.data_wait.start()
            self.data_wait.stop(started)
            yield self._batch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Measured(Loop):
    """The loop as it is, without what happens once: looking for a checkpoint before, saving after."""

    def _begin(self) -> None: ...

    def _save(self) -> None: ...

    def _finish(self, stop: Stop) -> Result:
        return Result(self.run.path, self.done, "accuracy", {})


class Kept(Callback):
    def __init__(self) -> None:
        self.records: list[Record] = []

    def trained(self, record: Record) -> None:
        self.records.append(record)


def recipe_for(options: argparse.Namespace, model: ModelSpec, **changes: Any) -> Recipe:
    return Recipe(
        **{
            "name": "benchmark",
            "model": model,
            "data": DataSpec(workers=0),
            "augment": Augment(crop="none", flip=0.0),
            "optim": OptimSpec(name="adamw", lr=1e-4, weight_decay=0.1),
            "schedule": ScheduleSpec(warmup=1),
            "steps": options.steps,
            "batch": options.batch,
            "ema": 0.9999,
            "eval_every": 0,
            "log_every": 20,
            "compile": options.compile,
            **changes,
        }
    )


def overhead(options: argparse.Namespace, device: torch.device) -> list[Row]:
    spec = ModelSpec(name=options.model)
    if options.tiny:
        spec = ModelSpec(name="ViT-Ti/16", image_size=32, depth=2)
        options.batch, options.steps, options.rounds = 8, 10, 2
    config = {"image_size": spec.image_size or 224, **({"depth": spec.depth} if spec.depth else {})}
    images = torch.randn(options.batch, 3, config["image_size"], config["image_size"], device=device)
    targets = torch.randint(0, 1000, (options.batch,), device=device)
    bare = BareStep(create_model(spec.name, seed=0, **config).to(device), images, targets, options.compile)
    loop = LoopRound(recipe_for(options, spec), create_model(spec.name, seed=0, **config), images, targets)
    for _ in range(2):  # compile, tune, allocate, record
        bare.run(10)
        loop.run(10)
    pairs = [(bare.run(options.steps), loop.run(options.steps)) for _ in range(options.rounds)]
    one, two = statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
    added = statistics.median(b / a - 1 for a, b in pairs)
    rate = options.batch / two
    row = {
        "what": f"loop against bare step, {spec.name}, batch {options.batch}, {loop.loop.precision}, compile={options.compile}",
        "bare_ms": round(one * 1e3, 3),
        "loop_ms": round(two * 1e3, 3),
        "added_percent": round(added * 100, 2),
        "images_per_second": round(rate, 1),
    }
    peak = peak_flops(device)
    if peak:
        shown = statistics.median(record["speed"]["mfu"] for record in loop.kept.records[-options.steps // 20 :])
        counted = rate * by_hand(loop.loop.prepared.model) / peak
        row |= {"mfu_shown": shown, "mfu_by_hand": round(counted, 5), "mfu_apart_percent": round((shown / counted - 1) * 100, 2)}
    return [row]


class BareStep:
    """Forward, backward, optimiser: nothing else. Recorded and replayed, as the loop does it, where it is not compiled."""

    def __init__(self, model: Model, images: torch.Tensor, targets: torch.Tensor, compiled: bool) -> None:
        self.model, self.images, self.targets = model.train(), images, targets
        self.low = chosen_precision("auto", images.device) == "bf16"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        self.backward = self._backward
        if compiled:
            model.compile()
        elif images.is_cuda:
            self.backward = capture(self._backward, model.parameters())

    def _backward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=self.low):
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        return loss.detach()

    def run(self, steps: int) -> float:
        """Seconds a step."""
        settle(self.images.device)
        began = time.perf_counter()
        for _ in range(steps):
            self.backward(self.images, self.targets)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        settle(self.images.device)
        return (time.perf_counter() - began) / steps


class LoopRound:
    """Rounds of the real loop over one resident batch."""

    def __init__(self, recipe: Recipe, model: Model, images: torch.Tensor, targets: torch.Tensor) -> None:
        self.kept = Kept()
        size = model.config.image_size
        split = OneImage(len(images), 1000)
        prepared = Prepared(model, Classify(1000), preset("google-vit", size=size), split, None, split.classes, "resident")
        self.folder = tempfile.TemporaryDirectory()
        world = World(images.device)
        self.loop = Measured(recipe.replace(micro_batch=recipe.batch), RunFolder(self.folder.name), world, prepared, [self.kept])
        self.loop.loader = Resident(self.loop.loader, images, targets)  # type: ignore[assignment]

    def run(self, steps: int) -> float:
        loop = self.loop
        loop.done, loop.total = 0, steps
        loop.step.total = steps
        settle(loop.world.device)
        began = time.perf_counter()
        loop.run_to_the_end()
        settle(loop.world.device)
        return (time.perf_counter() - began) / steps


def by_hand(model: Model) -> int:
    """Operations to learn from one image, written out for a plain ViT: three times the forward pass.

    The logits read the class token alone, so the last block computes keys and values for all tokens, and the rest for that one.
    """
    config = model.config
    rows, columns = config.grid
    patches, width, hidden = rows * columns, config.width, config.mlp
    tokens = patches + 1
    embedding = 2 * patches * 3 * config.patch[0] * config.patch[1] * width
    projections = 2 * tokens * (3 * width * width + width * width)
    attention = 2 * (2 * tokens * tokens * width)
    mlp = 2 * (2 * tokens * width * hidden)
    last = 2 * tokens * 2 * width * width + 2 * 2 * width * width + 2 * (2 * tokens * width) + 2 * (2 * width * hidden)
    return 3 * (embedding + (config.depth - 1) * (projections + attention + mlp) + last + 2 * width * config.outputs)


def planned_memory(options: argparse.Namespace, device: torch.device) -> list[Row]:
    cases = [("ViT-B/16", 64), ("ViT-L/16", 32)] if not options.tiny else [("ViT-Ti/16", 4)]
    rows = []
    for name, batch in cases:
        for ema in (0.0, 0.9999):
            recipe = recipe_for(options, ModelSpec(name=name), batch=batch, ema=ema, precision="bf16", compile=False, steps=3)
            began = time.perf_counter()
            need = make_plan(recipe, gpus=1, memory=80, micro_batch=batch).needs[0]
            row: Row = {
                "what": f"memory of {name}, micro-batch {batch}, {'with' if ema else 'without'} average",
                "planned_gib": round(need.tensors / 2**30, 4),
                "planning_seconds": round(time.perf_counter() - began, 1),
            }
            if device.type == "cuda":
                measured = held(recipe, device)
                row |= {"measured_gib": round(measured / 2**30, 4), "apart_percent": round((need.tensors / measured - 1) * 100, 2)}
            rows.append(row)
            print(row, flush=True)
    return rows


def held(recipe: Recipe, device: torch.device) -> int:
    """The most bytes of tensors in three steps of the loop."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    images = torch.randn(recipe.batch, 3, 224, 224, device=device)
    targets = torch.randint(0, 1000, (recipe.batch,), device=device)
    run = LoopRound(recipe, create_model(recipe.model.name, seed=0), images, targets)
    torch.cuda.reset_peak_memory_stats(device)
    run.run(3)
    most = torch.cuda.max_memory_allocated(device) - before
    del run, images, targets
    gc.collect()
    return most


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(rows: list[Row], options: argparse.Namespace, device: torch.device) -> None:
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"hardware": hardware, "torch": str(torch.__version__)}
    for row in rows:
        print("\n".join(f"{key:>20}  {value}" for key, value in row.items()), end="\n\n")
    if options.tiny:
        return
    name = hardware.lower().replace(" ", "-")
    compiled = "-compiled" if options.compile else ""
    file = Path(__file__).parent / "results" / f"train-loop-{name}-torch{about['torch'].split('+')[0]}{compiled}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*columns, *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
