"""What learning without labels costs, and what it is worth.

1. `--cost`: a step of masked patch prediction (each target) and of masked autoencoding against a supervised step of the same
   model, both taken by the training loop's own `Step`, in alternating rounds on one resident batch. The bars are 1.1 and 0.5.
2. `--study PACKED --out DIR`: on a packed Tiny-ImageNet, pre-train by each once, then fine-tune from each and from scratch with the
   same budget over several seeds; linear probe and 5-shot of every encoder, of an untrained one too. What is finished is not
   done again, so it can be cut off and called again; `--seconds` begins no new part after that long.

    python benchmarks/self_supervision.py --cost                                   # on a GPU, about two minutes
    python benchmarks/self_supervision.py --study TINY --out runs/study            # on one H200, about eight minutes
    python benchmarks/self_supervision.py --cost --tiny                            # on any machine: does everything run?
    python benchmarks/self_supervision.py --study digits --out runs/try --tiny

`--cost` writes benchmarks/results/self-supervision-cost-….csv, `--study` writes results.csv and curves.png into DIR; both name
hardware and versions.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.data.augment.spec import Augment
from vitrail.data.batch import Batch
from vitrail.data.preprocess import preset
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.fewshot import few_shot
from vitrail.evaluate.probes import probe
from vitrail.evaluate.settings import FeatureSpec, FewShotSpec, ProbeSpec
from vitrail.files import atomic_file, write_text
from vitrail.models import ViT, create_model, needed_flops
from vitrail.models.masked import Pretraining
from vitrail.recipes import recipe_named
from vitrail.tasks import Classify
from vitrail.train.callbacks import Callback, Record, RunInfo
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec, TaskSpec
from vitrail.train.loop import train
from vitrail.train.optimizers import Optimizer
from vitrail.train.parallel import Runner, World, choose_device
from vitrail.train.precision import autocast_dtype, chosen_precision
from vitrail.train.pretext import pretext, with_defaults
from vitrail.train.run import RunFolder
from vitrail.train.step import Step

Row = dict[str, Any]

CASES: dict[str, tuple[TaskSpec, float | None]] = {
    "masked-patch, mean colour": (TaskSpec(kind="masked-patch"), 1.1),
    "masked-patch, 4×4 downsized": (TaskSpec(kind="masked-patch", patch_target="downsized"), 1.1),
    "masked-patch, pixels": (TaskSpec(kind="masked-patch", patch_target="pixels"), 1.1),
    "masked-autoencoder, decoder 2×512": (TaskSpec(kind="masked-autoencoder", decoder_depth=2), None),
    "masked-autoencoder, decoder 4×512": (TaskSpec(kind="masked-autoencoder"), 0.5),
    "masked-autoencoder, decoder 8×512": (TaskSpec(kind="masked-autoencoder", decoder_depth=8), None),
}
COLOURS = {"scratch": "#444444", "masked-patch": "#0072B2", "mae": "#D55E00", "untrained": "#999999"}


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    if options.cost:
        cost(options)
    else:
        Study(options).run()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--cost", action="store_true")
    mode.add_argument("--study", metavar="PACKED", help="a packed folder, or any data source")
    parser.add_argument("--model", help="ViT-B/16 for --cost, ViT-S/8 for --study")
    parser.add_argument("--size", type=int, help="224 for --cost, 64 for --study")
    parser.add_argument("--batch", type=int, help="256 for --cost, 2048 for --study")
    parser.add_argument("--steps", type=int, default=20, help="of a round of --cost")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="the study's folder")
    parser.add_argument("--mpp-epochs", type=float, default=30)
    parser.add_argument("--mae-epochs", type=float, default=30)
    parser.add_argument("--finetune-epochs", type=float, default=6)
    parser.add_argument("--pretrain-lr", type=float, default=1e-3)
    parser.add_argument("--finetune-lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no new part of the study after so long")
    parser.add_argument("--tiny", action="store_true", help="small models, few steps; --cost then writes nothing")
    options = parser.parse_args()
    options.fields = {"width": 64, "depth": 2, "heads": 2, "mlp": 128} if options.tiny else {}
    if options.study and not options.out:
        parser.error("--study needs --out")
    defaults = ("ViT-B/16", 224, 256) if options.cost else ("ViT-S/8", 64, 2048)
    if options.tiny:
        torch.set_num_threads(1)
        defaults = ("ViT-Ti/16", 64, 8) if options.cost else ("ViT-Ti/4", 16, 64)
        options.steps, options.rounds = 2, 2
        options.mpp_epochs, options.mae_epochs, options.finetune_epochs = (min(one, 2) for one in (1, 1, 2))
    for name, value in zip(("model", "size", "batch"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def about(device: torch.device) -> Row:
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"hardware": hardware, "torch": str(torch.__version__)}


def write_rows(file: Path, rows: list[Row], facts: Row) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with atomic_file(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*columns, *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)
    print(f"written to {file}")


# What a step costs


def cost(options: argparse.Namespace) -> None:
    device = choose_device("auto")
    images = torch.randn(options.batch, 3, options.size, options.size, device=device).clamp(-1, 1)
    rows = []
    for name, (spec, bar) in CASES.items():
        rows.append(against_supervised(name, spec, bar, images, options))
        print("\n".join(f"{key:>20}  {value}" for key, value in rows[-1].items()), end="\n\n", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not options.tiny:
        facts = about(device)
        name = f"{facts['hardware'].lower().replace(' ', '-')}-torch{facts['torch'].split('+')[0]}"
        compiled = "-compiled" if options.compile else ""
        file = Path(__file__).parent / "results" / f"self-supervision-cost-{name}{compiled}.csv"
        write_rows(file, rows, facts)


def against_supervised(name: str, spec: TaskSpec, bar: float | None, images: torch.Tensor, options: argparse.Namespace) -> Row:
    """Two steps in alternating rounds, so that a machine that slows down slows both."""
    plain, masked = (Steps(one, images, options) for one in (None, spec))
    for _ in range(2):  # compile, tune, record, allocate
        plain.take(5 if not options.tiny else 1)
        masked.take(5 if not options.tiny else 1)
    pairs = [(plain.take(options.steps), masked.take(options.steps)) for _ in range(options.rounds)]
    ratios = [two / one for one, two in pairs]
    one, two = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "task": name,
        "model": f"{options.model} {options.size} px, batch {options.batch}, {plain.precision}, compile={options.compile}",
        "supervised_ms": round(one * 1e3, 3),
        "step_ms": round(two * 1e3, 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_least": round(min(ratios), 4),
        "ratio_most": round(max(ratios), 4),
        "bar": bar,
        "operations_ratio": round(masked.flops / plain.flops, 4),
        "images_per_second": round(options.batch / two, 1),
    }


class Steps:
    """The loop's own optimiser step over one batch; `spec` None is a supervised one over 1,000 classes."""

    def __init__(self, spec: TaskSpec | None, images: torch.Tensor, options: argparse.Namespace) -> None:
        device, optim = images.device, OptimSpec(name="adamw", lr=1e-4, weight_decay=0.05)
        self.precision = chosen_precision("auto", device)
        recipe = Recipe(
            model=ModelSpec(name=options.model, image_size=options.size),
            task=spec or TaskSpec(),
            optim=optim,
            schedule=ScheduleSpec(kind="constant"),
            steps=10**6,
            batch=len(images),
            compile=options.compile,
        )
        model = create_model(options.model, outputs=0 if spec else 1000, image_size=options.size, seed=0, **options.fields)
        assert isinstance(model, ViT)
        trained: ViT | Pretraining = model
        task: Any = Classify(1000)
        if spec is not None:
            trained, task = pretext(model, with_defaults(spec), preset("google-vit", size=options.size))
            trained.reset(torch.Generator().manual_seed(0))
        self.flops = trained.flops() if isinstance(trained, Pretraining) else needed_flops(model.config)
        trained.to(device).train()
        task.to(device)
        runner = Runner(trained, World(device), param_dtype=autocast_dtype(self.precision))
        if options.compile:
            trained.compile()
        optimizer = Optimizer(trained, optim)
        settings: Row = {"total": 10**6, "precision": self.precision, "average": None, "schedule": recipe.schedule}
        self.step = Step(runner, task, optimizer, recipe, **settings)
        targets = torch.randint(0, 1000, (len(images),), device=device)
        self.batch = Batch(images, targets, torch.arange(len(images)), 0, 0, 0, 1, len(images))
        self.done = 0

    def take(self, steps: int) -> float:
        """Seconds a step."""
        device = self.batch.images.device
        settle(device)
        began = time.perf_counter()
        for _ in range(steps):
            self.step.take([self.batch], self.done)
            self.done += 1
        settle(device)
        return (time.perf_counter() - began) / steps


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# What it is worth


class Study:
    """Parts that each leave something finished behind: runs of the loop, and one JSON file a measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        reference = options.study
        self.source = reference if ":" in reference or reference == "digits" else f"packed:{reference}"
        self.device, self.began = choose_device("auto"), time.perf_counter()
        self.model: dict[str, Any] = {"name": options.model, "image_size": options.size, "pooling": "mean"}
        self.model |= options.fields
        if self.source == "digits":
            self.model |= {"channels": 1}

    def run(self) -> None:
        parts = list(self.parts())
        for number, (name, part) in enumerate(parts):
            if time.perf_counter() - self.began > self.options.seconds:
                print(f"{len(parts) - number} parts are left, from {name} on; run the same command again to resume there")
                break
            started = time.perf_counter()
            part()
            print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        self.report()

    def parts(self) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "pre-train masked-patch", lambda: self.pretrain("masked-patch")
        yield "pre-train mae", lambda: self.pretrain("mae")
        for seed in range(self.options.seeds):
            for start in ("scratch", "masked-patch", "mae"):
                yield f"fine-tune {start}, seed {seed}", lambda start=start, seed=seed: self.finetune(start, seed)
        for start in ("untrained", "masked-patch", "mae", "scratch"):
            yield f"probe {start}", lambda start=start: self.measure(start)

    def pretrain(self, name: str) -> None:
        options, epochs = self.options, self.options.mae_epochs if name == "mae" else self.options.mpp_epochs
        recipe = recipe_named(f"{name}-tiny-imagenet")
        changes: dict[str, Any] = {}
        if options.tiny and name == "mae":
            changes["task"] = TaskSpec(kind="masked-autoencoder", decoder_width=32, decoder_depth=2)
        changes["optim"] = OptimSpec(name="adamw", lr=options.pretrain_lr, weight_decay=0.05, beta2=recipe.optim.beta2)
        changes["augment"] = Augment(crop_area=(0.2, 1.0), flip=0.0 if self.source == "digits" else 0.5, device="gpu")
        self.train(recipe, f"pretrain-{name}", ModelSpec(**self.model), epochs, eval_every=max(epochs / 6, 1), **changes)

    def finetune(self, start: str, seed: int) -> None:
        options = self.options
        model = ModelSpec(**self.model) if start == "scratch" else ModelSpec(start=str(self.out / f"pretrain-{start}"))
        recipe = Recipe(
            optim=OptimSpec(name="adamw", lr=options.finetune_lr, weight_decay=0.05),
            augment=Augment(crop_area=(0.2, 1.0), flip=0.0 if self.source == "digits" else 0.5, smoothing=0.1, device="gpu"),
            epochs=1,
            seed=seed,
        )
        self.train(recipe, f"finetune-{start}-{seed}", model, options.finetune_epochs, eval_every=1)

    def train(self, recipe: Recipe, name: str, model: ModelSpec, epochs: float, **changes: Any) -> None:
        images = len(vitrail.data.open_source(self.source).split("train"))
        warmup = max(1, min(250, round(epochs * (images // self.options.batch) / 10)))
        chosen = recipe.replace(
            name=name,
            model=model,
            data=DataSpec(source=self.source, workers=0 if self.options.tiny else self.options.workers),
            schedule=ScheduleSpec(kind="cosine", warmup=warmup),
            epochs=epochs,
            batch=self.options.batch,
            compile=self.options.compile,
            **changes,
        )
        train(chosen, self.out / name, callbacks=[Brief(name)])

    def measure(self, start: str) -> None:
        file = self.out / f"features-{start}.json"
        if file.exists():
            return
        bundle = vitrail.load(self.encoder(start), device=self.device)
        precision: Any = "bf16" if self.device.type == "cuda" else "fp32"
        context = EvalContext(world=World(self.device), batch=512, precision=precision, workers=self.options.workers)
        what = FeatureSpec(feature="mean")
        penalties = ProbeSpec(l2=(1e-1, 1e-2, 1e-3, 1e-4), iterations=200)
        linear = probe(bundle, self.source, spec=penalties, features=what, context=context)
        shots = few_shot(bundle, self.source, protocol=FewShotSpec(shots=(5,), seeds=3), features=what, context=context)
        found = {"probe": linear.accuracy, "l2": linear.chosen, "5shot": shots.mean(5), "5shot_sd": shots.std(5)}
        write_text(file, json.dumps(found, indent=2) + "\n")

    def encoder(self, start: str) -> Path:
        if start != "untrained":
            return Path(self.out / ("finetune-scratch-0" if start == "scratch" else f"pretrain-{start}"))
        folder = self.out / "untrained"
        if not folder.exists():
            fields = {name: value for name, value in self.model.items() if name not in ("name", "image_size")}
            model = create_model(self.model["name"], outputs=0, image_size=self.model["image_size"], seed=0, **fields)
            seen = preset("google-vit", size=model.config.image_size, channels=model.config.channels)
            vitrail.save(folder, model, preprocess=seen, task="unlabelled")
        return Path(folder)

    def report(self) -> None:
        rows = self.pretrained_rows() + self.finetuned_rows() + self.feature_rows()
        if rows:
            write_rows(self.out / "results.csv", rows, about(self.device))
            draw(self.out)
            table(rows)

    def pretrained_rows(self) -> list[Row]:
        names = {one: self.out / f"pretrain-{one}" for one in ("masked-patch", "mae")}
        ends = {name: RunFolder(folder).end() for name, folder in names.items()}
        return [
            {"start": name, "what": "pre-training, relative loss", "value": round(end["relative_loss"], 4),
             "seconds": round(end["seconds"], 1), "epochs": RunFolder(names[name]).saved_recipe().epochs}
            for name, end in ends.items() if end is not None
        ]  # fmt: skip

    def finetuned_rows(self) -> list[Row]:
        rows = []
        for start in ("scratch", "masked-patch", "mae"):
            for seed in range(self.options.seeds):
                folder = RunFolder(self.out / f"finetune-{start}-{seed}")
                end = folder.end()
                if end is not None:
                    row = {"start": start, "what": "fine-tuned, top-1", "seed": seed, "value": round(end["accuracy"], 5)}
                    rows.append(row | {"seconds": round(end["seconds"], 1), "epochs": folder.saved_recipe().epochs})
        return rows

    def feature_rows(self) -> list[Row]:
        rows = []
        for start in ("untrained", "masked-patch", "mae", "scratch"):
            file = self.out / f"features-{start}.json"
            if file.exists():
                found = json.loads(file.read_text(encoding="utf-8"))
                name = "scratch, fine-tuned" if start == "scratch" else start
                rows.append({"start": name, "what": "linear probe, top-1", "value": round(found["probe"], 5)})
                rows.append(
                    {"start": name, "what": "5-shot, top-1", "value": round(found["5shot"], 5), "sd": round(found["5shot_sd"], 5)}
                )
        return rows


class Brief(Callback):
    """A line a measurement."""

    def __init__(self, name: str) -> None:
        self.name = name

    def started(self, info: RunInfo) -> None:
        self.steps = info.steps

    def note(self, text: str) -> None:
        if text.startswith(("warning", "targets", "dropped", "masked", "resumed")):
            print(f"  {self.name}: {text}", flush=True)

    def validated(self, record: Record) -> None:
        metrics = {key: round(record[key], 4) for key in ("accuracy", "relative_loss", "loss") if key in record}
        print(f"  {self.name}: step {record['step']}/{self.steps} {metrics}", flush=True)


def table(rows: list[Row]) -> None:
    """Mean and deviation over seeds, to be pasted."""
    print("\n| start | measure | value |\n|---|---|---|")
    for start, what in dict.fromkeys((row["start"], row["what"]) for row in rows):
        values = [row["value"] for row in rows if (row["start"], row["what"]) == (start, what)]
        known = next((row["sd"] for row in rows if (row["start"], row["what"]) == (start, what) and "sd" in row), None)
        spread = f" ± {statistics.stdev(values):.2%} over {len(values)} seeds" if len(values) > 1 else ""
        spread = f" ± {known:.2%} over 3 draws" if known is not None else spread
        shown = f"{statistics.mean(values):.3f}" if "loss" in what else f"{statistics.mean(values):.2%}"
        print(f"| {start} | {what} | {shown}{spread} |")


def draw(out: Path) -> None:
    """Relative loss of the pre-training, and accuracy while fine-tuning, from the runs' own records."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for start in ("masked-patch", "mae"):
        records = RunFolder(out / f"pretrain-{start}").records()
        trained = [one for one in records if one["kind"] == "train"]
        measured = [one for one in records if one["kind"] == "val"]
        left.plot(
            [one["epoch"] for one in trained], [one["relative_loss"] for one in trained], color=COLOURS[start], lw=1, label=start
        )
        left.plot([one["epoch"] for one in measured], [one["relative_loss"] for one in measured], ".", color=COLOURS[start])
    left.axhline(1.0, color="#999999", lw=0.8, ls=":")
    left.set(
        xlabel="epoch of pre-training", ylabel="loss / best constant's", title="pre-training (dots: validation)", ylim=(None, 1.1)
    )
    for start in ("scratch", "masked-patch", "mae"):
        for number, folder in enumerate(sorted(out.glob(f"finetune-{start}-*"))):
            measured = [one for one in RunFolder(folder).records() if one["kind"] == "val"]
            label = start if number == 0 else None
            right.plot(
                [one["epoch"] for one in measured],
                [one["accuracy"] for one in measured],
                ".-",
                color=COLOURS[start],
                lw=1,
                label=label,
            )
    right.set(xlabel="epoch of fine-tuning", ylabel="top-1 on validation images", title="fine-tuning (a line a seed)")
    for axes in (left, right):
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    with atomic_file(out / "curves.png") as temporary:
        figure.savefig(temporary, dpi=140)


if __name__ == "__main__":
    main()
