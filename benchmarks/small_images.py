"""How accurate are small ViTs on small images? Each row trains by recipes, chooses nothing, and is evaluated once at the end.

| row | what |
|---|---|
| `s8` | ViT-S/8 on Tiny-ImageNet from scratch, longer and more regularised than the recipe `tiny-imagenet` |
| `s8-mae` | the same model: masked autoencoding first, on the same images, then their labels |
| `ti8` | ViT-Ti/8 distilled from the model of `s8` |
| `cifar10` | a small ViT on CIFAR-10 alone |
| `s8-cifar10` | the model of `s8`, fine-tuned on CIFAR-10 |
| `s8-imagenette`, `imagenette` | the model of `s8`, fine-tuned on Imagenette at 160 pixels, and the same from scratch |

A part of every training set is held out; the curves in the runs are of that part. The test images are used for nothing but the
row's accuracy. A row that starts from another one trains that first. What is finished is not run again, and a run that was cut
off is resumed by the same command.

    python benchmarks/small_images.py --tiny-imagenet packed:TINY --cifar packed:CIFAR --imagenette packed:IMAGENETTE \\
      --out runs/small --rows s8 s8-cifar10
    python benchmarks/small_images.py --out runs/try --tiny       # on any machine, on digits: does everything run?

Prints a table and writes benchmarks/results/small-images-….csv with hardware and versions; with --tiny into --out instead.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.api.finetuning import with_changes
from vitrail.bench.machine import hardware
from vitrail.data import open_source
from vitrail.files import atomic_file
from vitrail.recipes import recipe_named
from vitrail.study.settings import public_name
from vitrail.train.callbacks import Callback, Record
from vitrail.train.config import Recipe
from vitrail.train.loop import train
from vitrail.train.parallel import choose_device


@dataclass(frozen=True)
class Stage:
    """One training run: a recipe with changes, on one of the datasets, from the model of another stage."""

    recipe: str
    data: str
    start: str | None = None
    teacher: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)


_HELD_OUT = {"tiny-imagenet": 0.025, "cifar": 0.02, "imagenette": 0.03}
_LONGER = {
    "epochs": 300,
    "eval_every": 20,
    "model.stochastic_depth": 0.2,
    "augment.erase": 0.25,
    "augment.mix_probability": 1.0,
    "augment.mix_until": 0.9,
}

STAGES = {
    "s8": Stage("tiny-imagenet", "tiny-imagenet", changes=_LONGER),
    "mae": Stage("mae-tiny-imagenet", "tiny-imagenet"),
    "s8-mae": Stage("finetune-tiny-imagenet", "tiny-imagenet", start="mae"),
    "ti8": Stage("tiny-imagenet-distilled", "tiny-imagenet", teacher="s8"),
    "cifar10": Stage("cifar10-scratch", "cifar"),
    "s8-cifar10": Stage("finetune-cifar10-64", "cifar", start="s8"),
    "s8-imagenette": Stage("finetune-imagenette-160-gpu", "imagenette", start="s8"),
    "imagenette": Stage("imagenette-160-scratch", "imagenette"),
}
ROWS = tuple(name for name in STAGES if name != "mae")


class Progress(Callback):
    """Prints each evaluation on held-out images."""

    def __init__(self, name: str) -> None:
        self.name = name

    def validated(self, record: Record) -> None:
        shown = ("loss", "accuracy", "raw_accuracy", "attention_entropy")
        metrics = (f"{name} {record[name]:.4f}" for name in shown if name in record)
        print(f"{self.name}: step {record['step']}", *metrics, flush=True)


def main() -> None:
    options = parse()
    rows = [row_of(name, options) for name in options.rows]
    folder = options.out if options.tiny else Path(__file__).parent / "results"
    device = choose_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    file = folder / f"small-images-{name.lower().replace(' ', '-')}-torch{torch.__version__.split('+')[0]}.csv"
    written = _rows_of_other_runs(file, {(row["row"], str(row["seed"])) for row in rows}) + rows
    with atomic_file(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(written)
    print(f"written to {file}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in _HELD_OUT:
        parser.add_argument(f"--{name}", default="", metavar="SOURCE", help="a data source, such as packed:DIR")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="small models, few steps, digits for every dataset")
    options = parser.parse_args()
    options.sources = {name: "digits" if options.tiny else getattr(options, name.replace("-", "_")) for name in _HELD_OUT}
    for name in {stage.data for row in options.rows for stage in stages_before(row)}:
        if not options.sources[name]:
            parser.error(f"--{name} is missing: the rows {' '.join(options.rows)} need it")
    return options


def stages_before(name: str) -> list[Stage]:
    """The stage and all that it builds on."""
    stage = STAGES[name]
    return [one for before in (stage.start, stage.teacher) if before for one in stages_before(before)] + [stage]


def run_of(name: str, options: argparse.Namespace) -> tuple[Path, float]:
    """Train a stage, after those it builds on; returns its folder, and the seconds of training of all that it starts from."""
    stage, before = STAGES[name], 0.0
    changes: dict[str, Any] = {
        "data.source": options.sources[stage.data],
        "data.holdout": _HELD_OUT[stage.data],
        "seed": options.seed,
        **stage.changes,
    }
    if stage.start:
        start, before = run_of(stage.start, options)
        changes["model.start"] = str(start)
    if stage.teacher:
        changes["task.teacher"] = str(run_of(stage.teacher, options)[0])
    recipe = with_changes(recipe_named(stage.recipe), changes)
    began = time.perf_counter()
    folder = options.out / f"{name}-{options.seed}"
    result = train(small(recipe) if options.tiny else recipe, folder, callbacks=[Progress(name)])
    if result.ended_by is not None:
        sys.exit(f"{name} was interrupted; run the same command again to resume.")
    print(f"{name}: trained in {result.seconds:.0f} s, this time in {time.perf_counter() - began:.0f} s", flush=True)
    return result.out, before + result.seconds


def small(recipe: Recipe) -> Recipe:
    """The same recipe for a small model and few steps."""
    fields = {} if recipe.model.start else {"patch": 4, "width": 64, "depth": 2, "heads": 2, "mlp": 128}
    model = dataclasses.replace(recipe.model, image_size=16, channels=1, **fields)
    task = dataclasses.replace(recipe.task, decoder_depth=1, decoder_width=64) if recipe.task.decoder_depth else recipe.task
    augment = dataclasses.replace(recipe.augment, flip=0.0, device="cpu")
    schedule = dataclasses.replace(recipe.schedule, warmup=2)
    return recipe.replace(
        model=model, task=task, augment=augment, schedule=schedule, batch=64, epochs=2, eval_every=1, ema_warmup=True
    )


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a row, and evaluate it on the test images."""
    folder, seconds = run_of(name, options)
    stage, bundle = STAGES[name], vitrail.load(folder)
    source = open_source(options.sources[stage.data])
    split = next((one for one in ("val", "test") if one in source.splits), None)
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    found = bundle.evaluate(options.sources[stage.data], split=split, precision=precision, progress=False)
    low, high = found.intervals["accuracy"]
    row = {
        "row": name,
        "model": bundle.model.config.name,
        "parameters": sum(parameter.numel() for parameter in bundle.model.parameters()),
        "recipe": stage.recipe,
        "changes": " ".join(f"{key}={value}" for key, value in stage.changes.items()),
        "start": stage.start or "",
        "teacher": stage.teacher or "",
        "data": re.sub(r"/\S*/", "", source.describe()),  # without the folders of this machine
        "held_out": _HELD_OUT[stage.data],
        "seed": options.seed,
        "accuracy_percent": round(100 * found.metrics["accuracy"], 2),
        "low_percent": round(100 * low, 2),
        "high_percent": round(100 * high, 2),
        "images": found.images,
        "evaluated_in": precision,
        "training_seconds": round(seconds, 1),
        "hardware": hardware(choose_device("auto")),
        "vitrail": vitrail.__version__,
        "torch": str(torch.__version__),
        "date": time.strftime("%Y-%m-%d"),
        "command": command_of(name, options),
    }
    print("  ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
    return row


def command_of(name: str, options: argparse.Namespace) -> str:
    """The command of one row, without the folders of this machine."""
    datasets = dict.fromkeys(stage.data for stage in stages_before(name))
    sources = " ".join(f"--{one} {public_name(options.sources[one])}" for one in datasets)
    words = f"{sources} --out runs/small --rows {name} --seed {options.seed}" + " --tiny" * options.tiny
    return f"python benchmarks/small_images.py {words}"


def _rows_of_other_runs(file: Path, new: set[tuple[str, str]]) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as handle:
        return [row for row in csv.DictReader(handle) if (row["row"], row["seed"]) not in new]


if __name__ == "__main__":
    main()
