"""Does it learn as well as timm's model does?

The same settings twice: through `vitrail.train`, with its kernels, graph capture and loop, and with timm's VisionTransformer in a
plain PyTorch loop. Both get the same batches, augmented the same way by the same seed. Model, initial values, optimiser, schedule
and precision are equal by setting, each in its own code. Vitrail should not be below timm by more than 0.5 points of top-1
accuracy, as a mean over the seeds. The entropy of attention is reported too: 1 is uniform, near 0 each query sees one token only,
and such a model has stopped learning from context.

    python benchmarks/learning.py --data packed:TINY --out runs/learning             # three seeds of 20 epochs
    python benchmarks/learning.py --data packed:TINY --out runs/learning --short     # one seed of 5 epochs
    python benchmarks/learning.py --data packed:TINY --out runs/strong --strong --batch 512 --lr 1e-3 --epochs 20 --seeds 1
    python benchmarks/learning.py --data packed:CIFAR --out runs/cpu --model ViT-Ti/8 --size 32 --epochs 2 --precision bf16
    python benchmarks/learning.py --data digits --out runs/try --tiny                # on any machine: does everything run?

Run the short form after every change of kernels, attention, optimiser or loop. One seed is noisy, so its bar is 2 points: it finds
mistakes, not small losses. What is finished is not run again, so a run that was cut off can be resumed by the same command; after a
change choose another --out.

Prints a table and writes benchmarks/results/learning-….csv with hardware and versions; with --tiny or --only into --out instead.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.bench.machine import hardware
from vitrail.data import open_source
from vitrail.data.augment.spec import Augment
from vitrail.data.loader import EvalLoader, TrainLoader
from vitrail.data.preprocess import preset
from vitrail.files import atomic_file, write_text
from vitrail.models import ViTConfig, model_config
from vitrail.train.callbacks import Callback, Record
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec
from vitrail.train.loop import total_steps, train
from vitrail.train.parallel import choose_device
from vitrail.train.precision import autocast, chosen_precision

Row = dict[str, Any]

LIBRARIES = ("vitrail", "timm")
LIGHT = Augment(crop_area=(0.35, 1.0), smoothing=0.1, device="gpu")
STRONG = Augment(
    crop_area=(0.25, 1.0), randaugment="torchvision", randaugment_count=1, randaugment_magnitude=27, erase=0.25,
    mixup=0.8, cutmix=1.0, smoothing=0.1, device="gpu",
)  # fmt: skip
BAR, SHORT_BAR = 0.5, 2.0  # points of top-1 accuracy that Vitrail may be below


def main() -> None:
    options = parse()
    device = choose_device("auto")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(options.seeds):
        for library in LIBRARIES if options.only is None else (options.only,):
            rows.append(finished(library, seed, options, device))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    report(rows, options, device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a data source with splits train and val or test, such as packed:DIR")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--model", default="ViT-S/8")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument(
        "--init", default="small", choices=("paper", "small"), help="Vitrail's initial values; timm's are always small"
    )
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--precision", default="auto", choices=("auto", "bf16", "fp32"), help="of both; auto: fp32 for timm on a CPU"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=LIBRARIES, help="run one of them, for instance to run both at once in two processes")
    parser.add_argument("--strong", action="store_true", help="RandAugment, erasing, mixup and cutmix besides crop and flip")
    parser.add_argument("--short", action="store_true", help="one seed of 5 epochs")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps, to try everything")
    options = parser.parse_args()
    options.fields = {}
    if options.short:
        options.seeds, options.epochs = 1, 5
    if options.tiny:
        options.model, options.size, options.batch, options.epochs, options.warmup, options.workers = "ViT-Ti/4", 16, 64, 2, 2, 0
        options.fields = {"width": 64, "depth": 2, "heads": 2, "mlp": 128}
        torch.set_num_threads(1)
    return options


def recipe_for(seed: int, options: argparse.Namespace) -> Recipe:
    """The settings of both."""
    source = open_source(options.data)
    validate = next(name for name in ("val", "test") if name in source.splits)
    digits = options.data == "digits"
    channels = {"channels": 1} if digits else {}
    return Recipe(
        name="learning",
        model=ModelSpec(
            name=options.model,
            image_size=options.size,
            pooling="mean",
            init=options.init,
            stochastic_depth=0.1,
            **channels,
            **options.fields,
        ),
        data=DataSpec(source=options.data, validate=validate, workers=options.workers),
        augment=dataclasses.replace(STRONG if options.strong else LIGHT, flip=0.0 if digits else 0.5),
        optim=OptimSpec(name="adamw", lr=options.lr, weight_decay=0.05, clip=1.0),
        schedule=ScheduleSpec(kind="cosine", warmup=options.warmup),
        epochs=options.epochs,
        batch=options.batch,
        precision=options.precision,
        seed=seed,
        eval_every=0,
    )


def finished(library: str, seed: int, options: argparse.Namespace, device: torch.device) -> Row:
    """The row of one run, read from its file where the same run was finished before."""
    recipe = recipe_for(seed, options)
    settings = json.loads(json.dumps(recipe.to_dict()))
    file = options.out / f"{library}-{seed}.json"
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["settings"] == settings:
            print(f"read from {file}, not run again; choose another --out after a change", flush=True)
            return dict(found["row"])
    began = time.perf_counter()
    accuracy, loss, entropy = (ours if library == "vitrail" else theirs)(recipe, options, device)
    seconds = time.perf_counter() - began
    row = {
        "library": library,
        "model": options.model,
        "size": options.size,
        "init": options.init if library == "vitrail" else "timm",
        "epochs": options.epochs,
        "batch": options.batch,
        "lr": options.lr,
        "warmup": options.warmup,
        "augment": "strong" if options.strong else "light",
        "precision": options.precision,
        "seed": seed,
        "accuracy_percent": round(100 * accuracy, 2),
        "loss": round(loss, 4),
        "attention_entropy": round(entropy, 3),
        "seconds": round(seconds, 1),
        **environment(options, device),
    }
    write_text(file, json.dumps({"settings": settings, "row": row}, indent=1))
    return row


def environment(options: argparse.Namespace, device: torch.device) -> Row:
    """What a row was measured with."""
    import timm

    return {
        "data": re.sub(r"/\S*/", "", open_source(options.data).describe()),  # without the folders of this machine
        "hardware": hardware(device),
        "torch": str(torch.__version__),
        "timm": timm.__version__,
    }


class Progress(Callback):
    def trained(self, record: Record) -> None:
        if record["step"] % 500 == 0:
            print(f"vitrail: step {record['step']}, loss {record['loss']:.3f}", flush=True)


def ours(recipe: Recipe, options: argparse.Namespace, device: torch.device) -> tuple[float, float, float]:
    """Accuracy, loss and entropy of attention on the validation split at the end."""
    result = train(recipe, options.out / f"vitrail-{recipe.model.init}-{recipe.seed}", callbacks=[Progress()])
    bundle = vitrail.load(result.out, device=device)
    assert bundle.preprocess is not None
    split = open_source(options.data).split(recipe.data.validate)
    batch = next(iter(EvalLoader(split, preprocess=bundle.preprocess, batch=64, workers=0, device=device)))
    return result.metrics["accuracy"], result.metrics["loss"], attention_entropy(bundle.model, batch.images)


def theirs(recipe: Recipe, options: argparse.Namespace, device: torch.device) -> tuple[float, float, float]:
    """The same with timm's model and nothing of Vitrail but the batches."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # gave NaN for 64 tokens with torch 2.11
    source, spec = open_source(options.data), recipe.data
    split = source.split(spec.train)
    torch.manual_seed(recipe.seed)
    model = timm_model(recipe, len(split.classes)).to(device).train()
    preprocess = preset("google-vit", size=options.size, channels=recipe.model.channels or 3)
    batches = TrainLoader(
        split,
        preprocess=preprocess,
        augment=recipe.augment,
        batch=recipe.batch,
        seed=recipe.seed,
        workers=spec.workers,
        device=device,
    )
    total, precision = total_steps(recipe, batches.steps), chosen_precision(recipe.precision, device)
    optim = recipe.optim
    optimizer = torch.optim.AdamW(decayed(model, optim.weight_decay), lr=optim.lr, fused=device.type == "cuda")
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * cosine(step, total, recipe.schedule.warmup)
        with autocast(precision, device):
            logits = model(batch.images)
        loss = F.cross_entropy(logits.float(), batch.targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        optimizer.step()
        if (step + 1) % 500 == 0:
            print(f"timm: step {step + 1}, loss {loss.item():.3f}", flush=True)
        if step + 1 == total:
            break
    batches.close()
    held_out = EvalLoader(source.split(spec.validate), preprocess=preprocess, batch=512, workers=spec.workers, device=device)
    accuracy, loss_there = evaluated(model, held_out, precision)
    return accuracy, loss_there, attention_entropy(model, next(iter(held_out)).images[:64])


def timm_model(recipe: Recipe, classes: int) -> nn.Module:
    """timm's VisionTransformer of the same function: mean pooling after the norm, no class token, the same GELU."""
    from timm.models.vision_transformer import VisionTransformer

    fields = {name: getattr(recipe.model, name) for name in ("width", "depth", "heads", "mlp", "channels")}
    given = {name: value for name, value in fields.items() if value is not None}
    assert isinstance(recipe.model.image_size, int)
    config = model_config(recipe.model.name, outputs=classes, image_size=recipe.model.image_size, pooling="mean", **given)
    assert isinstance(config, ViTConfig)
    return VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch,
        in_chans=config.channels,
        num_classes=classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp / config.width,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
        act_layer="gelu_tanh" if config.gelu == "tanh" else "gelu",
        drop_path_rate=recipe.model.stochastic_depth,
    )


def decayed(model: nn.Module, weight_decay: float) -> list[Row]:
    """Weight decay for matrices and the patch filters alone, as Vitrail and timm both have it."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if parameter.ndim > 1 and name != "pos_embed"]
    others = [parameter for name, parameter in named if parameter.ndim <= 1 or name == "pos_embed"]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def cosine(step: int, total: int, warmup: int) -> float:
    progress = min(max((step - warmup) / max(total - warmup, 1), 0.0), 1.0)
    return 0.5 * (1 + math.cos(math.pi * progress)) * (min(1.0, step / warmup) if warmup else 1.0)


@torch.no_grad()
def evaluated(model: nn.Module, loader: EvalLoader, precision: str) -> tuple[float, float]:
    model.eval()
    right, loss, count = 0, 0.0, 0
    for batch in loader:
        with autocast(precision, batch.images.device):
            logits = model(batch.images).float()
        right += int((logits.argmax(1) == batch.targets).sum())
        loss += float(F.cross_entropy(logits, batch.targets, reduction="sum"))
        count += len(batch.targets)
    return right / count, loss / count


@torch.no_grad()
def attention_entropy(model: nn.Module, images: Tensor) -> float:
    """Mean entropy of attention over layers, heads and queries, as a share of the uniform one's."""
    found = []

    def look(module: nn.Module, inputs: Any, qkv: Tensor) -> None:
        owner = owners[module]
        heads = owner.heads if hasattr(owner, "heads") else owner.num_heads
        q, k, _ = qkv.float().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        found.append(torch.special.entr(weights).sum(-1).mean() / math.log(weights.shape[-1]))

    owners: dict[nn.Module, Any] = {
        part: owner for owner in model.modules() for name, part in owner.named_children() if name == "qkv"
    }
    hooks = [part.register_forward_hook(look) for part in owners]
    model.eval()(images)
    for hook in hooks:
        hook.remove()
    return float(torch.stack(found).mean())


def report(rows: list[Row], options: argparse.Namespace, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    means = {}
    for library in dict.fromkeys(row["library"] for row in rows):
        values = [row["accuracy_percent"] for row in rows if row["library"] == library]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        means[library] = statistics.mean(values)
        print(f"{library:>8}: {means[library]:.2f}{spread} % top-1, {len(values)} seed{'s' * (len(values) != 1)}")
    if len(means) == 2 and not options.tiny:
        bar = SHORT_BAR if options.seeds == 1 else BAR
        difference = means["vitrail"] - means["timm"]
        verdict = "met" if difference >= -bar else "MISSED"
        print(f"difference: {difference:+.2f} points; bar: at least {-bar:+.1f} ({verdict})")
    short = f"{'-strong' * options.strong}{'-short' * options.short}"
    precision = f"-{options.precision}" if options.precision != "auto" else ""
    file = f"learning{short}{precision}-{name.lower().replace(' ', '-')}-torch{torch.__version__.split('+')[0]}.csv"
    folder = options.out if options.tiny or options.only else Path(__file__).parent / "results"
    with atomic_file(folder / file) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*of_other_runs(folder / file, rows), *rows])
    print(f"written to {folder / file}")


def of_other_runs(file: Path, rows: list[Row]) -> list[Row]:
    """The rows of a file that these do not measure again: of other data, settings or seeds on the same hardware."""
    measured = ("accuracy_percent", "loss", "attention_entropy", "seconds", "hardware", "torch", "timm")
    settings = [name for name in rows[0] if name not in measured]
    again = {tuple(str(row[name]) for name in settings) for row in rows}
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as handle:
        before = list(csv.DictReader(handle, restval=""))
    kept = [{name: one.get(name, "") for name in rows[0]} for one in before]  # older files have fewer columns
    return [one for one in kept if tuple(one[name] for name in settings) not in again]


if __name__ == "__main__":
    main()
