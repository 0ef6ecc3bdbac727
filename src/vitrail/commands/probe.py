"""`vitrail probe`: fit a linear or nearest-neighbour classifier on a model's features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich import box
from rich.table import Table

from vitrail.commands.feature_scores import show_settings, write_scores
from vitrail.commands.options import DEFAULT, Checkpoint, Features, Json, Options, data_or_own, progress_bar
from vitrail.commands.output import check_output_file
from vitrail.commands.terminal import Console
from vitrail.evaluate.settings import FeatureSpec, ProbeSpec

if TYPE_CHECKING:
    from vitrail.evaluate.probes import ProbeResult


Settings = Annotated[ProbeSpec, tyro.conf.arg(name="")]


def probe(
    checkpoint: Checkpoint,
    /,
    *,
    data: str | None = None,
    train_split: str = "train",
    split: str | None = None,
    settings: Settings = ProbeSpec(),  # noqa: B008 - it is frozen
    features: Features = FeatureSpec(),  # noqa: B008
    out: Path | None = None,
    overwrite: bool = False,
    options: Options = DEFAULT,
    json_: Json = False,
) -> None:
    """Fit a classifier on frozen features: logistic regression by L-BFGS, or k nearest neighbours.

    The L2 penalty, or k, is chosen on a held-out part of the training images. The feature and all settings are printed and
    saved with the score. The checkpoint's own head is not used.

    Example: vitrail probe runs/pets --data torchvision:CIFAR10

    Example: vitrail probe B_16.npz --data folder:flowers --feature mean --layer 8 --no-norm --method knn

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16 or hf:owner/name. It needs no head.
        data: A source with labels, such as folder:DIR, csv:FILE or torchvision:CIFAR10. Default: that of the run.
        train_split: The split to fit on.
        split: The split to test on; default: val, or test if there is no val.
        settings: How the probe is fitted.
        features: Which features.
        out: Write the score and all settings to this JSON file.
        overwrite: Replace an existing file.
        options: How images are loaded and computed.
        json_: Print JSON instead of a table.
    """
    from vitrail.evaluate.fewshot import open_train_and_test
    from vitrail.evaluate.probes import probe_splits
    from vitrail.train.parallel import joined

    check_output_file(out, overwrite=overwrite)
    console = Console(stderr=json_)
    data = data_or_own(data, checkpoint, console)
    with joined(options.device) as world:
        bundle = options.bundle(checkpoint, world)
        train_images, test_split, seen = open_train_and_test(bundle, data, train_split, split, options.eval_context(world))
        with progress_bar(console, "computing features", len(train_images) + len(test_split), world) as advance:
            context = options.eval_context(world, advance)
            result = replace(probe_splits(bundle, train_images, test_split, settings, features, context), trained_on=seen)
        if not world.main:
            return
    about = {"checkpoint": checkpoint, "data": data, "train": train_split, "test": test_split.name}
    write_scores(result, bundle, about, out, as_json=json_)
    if json_:
        return
    _show(console, result, test_split.name)
    if out is not None:
        console.print(f"score and settings: {out}", highlight=False, soft_wrap=True)


def _show(console: Console, result: ProbeResult, test: str) -> None:
    parameter = "l2" if result.spec.method == "logistic" else "neighbours"
    if result.validation:
        title = f"choosing {parameter} on held-out images"
        table = Table(parameter, "held-out accuracy", box=box.SIMPLE_HEAD, title=title, title_justify="left")
        for value, score in result.validation.items():
            table.add_row(f"{value:g}", f"{score:.2%}", style="bold" if value == result.chosen else "")
        console.print(table)
    low, high = result.interval
    console.print(
        f"{result.spec.method} probe on {test}: {result.accuracy:.2%} ({low:.2%} – {high:.2%}), {parameter} {result.chosen:g}",
        highlight=False,
    )
    console.print(
        f"features: {result.features.describe()}; images: {result.train_images:,} training, {result.images:,} test",
        highlight=False,
    )
    show_settings(console, result)
