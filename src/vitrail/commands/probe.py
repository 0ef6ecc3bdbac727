"""`vitrail probe`: what a simple classifier can read from a model's features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from vitrail.commands.options import DEFAULT, Checkpoint, Features, Json, Options, progress_bar
from vitrail.evaluate.features import FeatureSpec
from vitrail.evaluate.fewshot import support_and_test
from vitrail.evaluate.probing import Probed, ProbeSpec, probe_splits
from vitrail.files import write_text
from vitrail.train.parallel import joined

Settings = Annotated[ProbeSpec, tyro.conf.arg(name="")]


def probe(
    checkpoint: Checkpoint,
    /,
    *,
    data: str,
    train: str = "train",
    test: str | None = None,
    settings: Settings = ProbeSpec(),  # noqa: B008 - it is frozen
    features: Features = FeatureSpec(),  # noqa: B008
    out: Path | None = Path("probe.json"),
    options: Options = DEFAULT,
    json_: Json = False,
) -> None:
    """Fit a classifier on frozen features: logistic regression by L-BFGS, or nearest neighbours.

    Its one free value is chosen on a held-out part of the training images. Layer, token or pooling, norm and all settings are
    printed and saved with the score; the checkpoint's own head is not used.

    Example: vitrail probe runs/pets --data torchvision:CIFAR10

    Example: vitrail probe B_16.npz --data folder:flowers --what mean --layer 8 --no-norm --method knn

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, or hf:owner/name. It needs no head.
        data: A source with labels, such as folder:DIR, csv:FILE or torchvision:CIFAR10.
        train: The split to fit on.
        test: The split to measure on; val, or else test, if not said.
        settings: How the probe is fitted.
        features: Which features.
        out: Where to write the score and all settings, as JSON; None: nowhere.
        options: How images are read and computed.
        json_: Print JSON for a program instead of a table.
    """
    console = Console(stderr=json_)
    with joined(options.device) as world:
        bundle = options.bundle(checkpoint, world)
        learn, held = support_and_test(data, train, test, options.running(world))
        with progress_bar(console, "computing features", len(learn) + len(held), world) as advance:
            found = probe_splits(bundle, learn, held, settings, features, options.running(world, advance))
        if not world.main:
            return
    about = {"checkpoint": checkpoint, "model": bundle.model.config.name, "data": data, "train": train, "test": held.name}
    content = json.dumps({**about, **found.to_dict()}, indent=2)
    if out is not None:
        write_text(out, content + "\n")
    if json_:
        print(content)  # noqa: T201
        return
    _show(console, found, held.name)
    if out is not None:
        console.print(f"score and settings: {out}", highlight=False, soft_wrap=True)


def _show(console: Console, found: Probed, test: str) -> None:
    value = "l2" if found.spec.method == "logistic" else "neighbours"
    if found.validation:
        table = Table(value, "held-out accuracy", box=box.SIMPLE_HEAD, title="choice on the held-out part", title_justify="left")
        for one, score in found.validation.items():
            table.add_row(f"{one:g}", f"{score:.2%}", style="bold" if one == found.chosen else "")
        console.print(table)
    low, high = found.interval
    console.print(
        f"{found.spec.method} probe on {test}: {found.accuracy:.2%} ({low:.2%} – {high:.2%}), {value} {found.chosen:g}",
        highlight=False,
    )
    console.print(
        f"features: {found.features.describe()}; {found.train_images:,} training and {found.images:,} test images", highlight=False
    )
    console.print(f"preprocessing: {found.preprocess.describe()}", highlight=False, soft_wrap=True)
    for image in found.bad:
        console.print(f"left out {image.name}: {image.fault}", highlight=False, soft_wrap=True)
