"""`vitrail fewshot`: how well a few images a class are told apart by a model's features."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from vitrail.commands.options import DEFAULT, Checkpoint, Features, Json, Options, progress_bar
from vitrail.evaluate.features import FeatureSpec
from vitrail.evaluate.fewshot import FewShot, FewShotEvaluator, FewShotSpec, support_and_test
from vitrail.evaluate.measuring import bundle_preprocess
from vitrail.files import write_text
from vitrail.train.parallel import joined

Protocol = Annotated[FewShotSpec, tyro.conf.arg(name="")]


def fewshot(
    checkpoint: Checkpoint,
    /,
    *,
    data: str,
    train: str = "train",
    test: str | None = None,
    protocol: Protocol = FewShotSpec(),  # noqa: B008 - it is frozen
    features: Features = FeatureSpec(),  # noqa: B008
    out: Path | None = Path("fewshot.json"),
    options: Options = DEFAULT,
    json_: Json = False,
) -> None:
    """Few-shot linear evaluation, the paper's running measure: ridge regression in closed form on frozen features.

    Exactly k images of each class are drawn, for each seed anew; the checkpoint's own head is not used, so any classes will do.

    Example: vitrail fewshot runs/pets --data torchvision:CIFAR10

    Example: vitrail fewshot B_16.npz --data folder:flowers --shots 5 10 --seeds 5 --short-class drop

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, or hf:owner/name. It needs no head.
        data: A source with labels, such as folder:DIR, csv:FILE or torchvision:CIFAR10.
        train: The split images are drawn from.
        test: The split to measure on; val, or else test, if not said.
        protocol: How many images, and how the classifier is fitted.
        features: Which features.
        out: Where to write the scores, all settings and the files that were drawn, as JSON; None: nowhere.
        options: How images are read and computed.
        json_: Print JSON for a program instead of a table.
    """
    console = Console(stderr=json_)
    with joined(options.device) as world:
        bundle = options.bundle(checkpoint, world)
        support, held = support_and_test(data, train, test, options.running(world))
        evaluator = FewShotEvaluator(support, held, bundle_preprocess(bundle), protocol=protocol, features=features)
        total = len(evaluator.drawn) + len(held)
        with progress_bar(console, "computing features", total, world) as advance:
            found = evaluator.run(bundle.model, options.running(world, advance))
        if not world.main:
            return
    about = {"checkpoint": checkpoint, "model": bundle.model.config.name, "data": data, "train": train, "test": held.name}
    content = json.dumps({**about, **found.to_dict()}, indent=2)
    if out is not None:
        write_text(out, content + "\n")
    if json_:
        print(content)  # noqa: T201
        return
    _show(console, found, len(support.classes), held.name)
    if out is not None:
        console.print(f"scores and the files drawn: {out}", highlight=False, soft_wrap=True)


def _show(console: Console, found: FewShot, classes: int, test: str) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"few-shot accuracy on {test}, {classes} classes", title_justify="left")
    for heading in ("shots", "mean", "± sd", "each seed", "dropped classes"):
        table.add_column(heading, justify="right")
    for shots in found.protocol.shots:
        dropped = next(len(one.dropped) for one in found.trials if one.shots == shots)
        deviation = found.deviation(shots)
        each = "  ".join(f"{value:.2%}" for value in found.accuracies(shots))
        spread = "–" if math.isnan(deviation) else f"{deviation:.2%}"
        table.add_row(str(shots), f"{found.mean(shots):.2%}", spread, each, str(dropped) if dropped else "–")
    console.print(table)
    console.print(f"features: {found.features.describe()}", highlight=False)
    console.print(f"preprocessing: {found.preprocess.describe()}", highlight=False, soft_wrap=True)
    for one in found.bad:
        console.print(f"left out {one.name}: {one.fault}", highlight=False, soft_wrap=True)
