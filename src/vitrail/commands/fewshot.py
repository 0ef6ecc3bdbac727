"""`vitrail fewshot`: evaluate a model's features with a few images per class."""

from __future__ import annotations

import math
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
from vitrail.evaluate.settings import FeatureSpec, FewShotSpec

if TYPE_CHECKING:
    from vitrail.evaluate.fewshot import FewShotResult


Protocol = Annotated[FewShotSpec, tyro.conf.arg(name="")]


def fewshot(
    checkpoint: Checkpoint,
    /,
    *,
    data: str | None = None,
    train_split: str = "train",
    split: str | None = None,
    protocol: Protocol = FewShotSpec(),  # noqa: B008 - it is frozen
    features: Features = FeatureSpec(),  # noqa: B008
    out: Path | None = None,
    overwrite: bool = False,
    options: Options = DEFAULT,
    json_: Json = False,
) -> None:
    """Few-shot linear evaluation, as in the paper: ridge regression in closed form on frozen features.

    Exactly k images per class are drawn for each seed. The checkpoint's own head is not used, so any dataset with classes works.

    Example: vitrail fewshot runs/pets --data torchvision:CIFAR10

    Example: vitrail fewshot B_16.npz --data folder:flowers --shots 5 10 --seeds 5 --small-classes drop

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16 or hf:owner/name. It needs no head.
        data: A source with labels, such as folder:DIR, csv:FILE or torchvision:CIFAR10. Default: that of the run.
        train_split: The split from which the images are drawn.
        split: The split to test on; default: val, or test if there is no val.
        protocol: How many images, and how the classifier is fitted.
        features: Which features.
        out: Write the scores, all settings and the drawn files to this JSON file.
        overwrite: Replace an existing file.
        options: How images are loaded and computed.
        json_: Print JSON instead of a table.
    """
    from vitrail.evaluate.fewshot import FewShotEvaluator, open_train_and_test
    from vitrail.train.parallel import joined

    check_output_file(out, overwrite=overwrite)
    console = Console(stderr=json_)
    data = data_or_own(data, checkpoint, console)
    with joined(options.device) as world:
        bundle = options.bundle(checkpoint, world)
        train_images, test_split, seen = open_train_and_test(bundle, data, train_split, split, options.eval_context(world))
        evaluator = FewShotEvaluator(train_images, test_split, bundle.stored_preprocess(), protocol=protocol, features=features)
        total = len(evaluator.drawn) + len(test_split)
        with progress_bar(console, "computing features", total, world) as advance:
            result = replace(evaluator.run(bundle.model, options.eval_context(world, advance)), trained_on=seen)
        if not world.main:
            return
    about = {"checkpoint": checkpoint, "data": data, "train": train_split, "test": test_split.name}
    write_scores(result, bundle, about, out, as_json=json_)
    if json_:
        return
    _show(console, result, len(train_images.classes), test_split.name)
    if out is not None:
        console.print(f"scores and drawn files: {out}", highlight=False, soft_wrap=True)


def _show(console: Console, result: FewShotResult, classes: int, test: str) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"few-shot accuracy on {test}, {classes} classes", title_justify="left")
    for heading in ("shots", "mean", "± std", "each seed", "dropped classes"):
        table.add_column(heading, justify="right")
    for shots in result.protocol.shots:
        dropped = next(len(one.dropped) for one in result.trials if one.shots == shots)
        std = result.std(shots)
        std_text = "–" if math.isnan(std) else f"{std:.2%}"
        each = "  ".join(f"{value:.2%}" for value in result.accuracies(shots))
        table.add_row(str(shots), f"{result.mean(shots):.2%}", std_text, each, str(dropped) if dropped else "–")
    console.print(table)
    console.print(f"features: {result.features.describe()}", highlight=False)
    show_settings(console, result)
