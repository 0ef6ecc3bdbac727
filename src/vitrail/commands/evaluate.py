"""`vitrail eval`: how good a checkpoint is on labelled images."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from vitrail.commands.options import DEFAULT, Checkpoint, Json, Options, progress_bar
from vitrail.data.types import Split
from vitrail.evaluate.classification import per_class
from vitrail.evaluate.measuring import Match, Measured, measure, open_split
from vitrail.evaluate.real_labels import read_real
from vitrail.evaluate.report import check_free, write_report
from vitrail.evaluate.report_page import NAMES, figure_text
from vitrail.train.parallel import joined


def evaluate(
    checkpoint: Checkpoint,
    /,
    *,
    data: str,
    split: str | None = None,
    sizes: tuple[int, ...] = (),
    real: Path | None = None,
    match: Match = "name",
    ignore_unknown_classes: bool = False,
    report: Path | None = None,
    overwrite: bool = False,
    options: Options = DEFAULT,
    json_: Json = False,
) -> None:
    """Evaluate a checkpoint on labelled images: accuracy, calibration, confusions; mAP for several labels, MAE for numbers.

    Every image counts once, whatever the batch, the workers or the ranks (torchrun), and figures come with 95 % intervals.

    Example: vitrail eval runs/pets --data folder:pets --report pets-report

    Example: vitrail eval B_16.npz --data folder:imagenet --sizes 224 384 --real real.json --match order

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, or hf:owner/name.
        data: A source such as folder:DIR, csv:FILE, packed:DIR, torchvision:CIFAR10 or hf:NAME.
        split: Which split; val, or else test, if not said.
        sizes: Evaluate at these input sizes, side in pixels, the model's positions resampled for each.
        real: A JSON file of reassessed labels, such as ImageNet ReaL's real.json. Images without any are skipped and counted.
        match: Find outputs by the names of classes, or take the data's classes in their order.
        ignore_unknown_classes: Leave out images of classes the checkpoint does not know.
        report: Write a folder with report.html, confusion.png and .csv, per-class.csv, predictions.csv, metrics.json.
        overwrite: Replace a report that is there already.
        options: How images are read and computed.
        json_: Print JSON for a program instead of a table.
    """
    console = Console(stderr=json_)
    if report is not None:
        check_free(report, overwrite)
    with joined(options.device) as world:
        bundle = options.bundle(checkpoint, world)
        bundle.check_head()
        opened = open_split(bundle, data, split, match=match, bad_images=options.bad_images, ignore_unknown=ignore_unknown_classes)
        truth = partial(read_real, real, classes=opened.classes) if real is not None else None
        wanted: tuple[int | None, ...] = sizes or (None,)
        with progress_bar(console, "evaluating", len(opened) * len(wanted), world) as advance:
            running = options.running(world, advance)
            results = [measure(bundle, opened, size=size, match=match, real=truth, running=running) for size in wanted]
        if not world.main:
            return
    about = {"checkpoint": checkpoint, "model": bundle.model.config.name, "data": data}
    if report is not None:
        write_report(report, results, opened, about)
    if json_:
        print(json.dumps({**about, "split": opened.name, "results": [one.summary() for one in results]}, indent=2))  # noqa: T201
        return
    for result in results:
        _show(console, result, opened)
    if report is not None:
        console.print(f"report: {report / 'report.html'}", highlight=False, soft_wrap=True)


def _show(console: Console, result: Measured, split: Split) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"{split.name} at {result.size[0]}×{result.size[1]}", title_justify="left")
    for heading in ("figure", "value", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, value in result.figures.items():
        low, high = (figure_text(name, one) for one in result.intervals[name])
        table.add_row(NAMES[name], figure_text(name, value), f"{low} – {high}")
    console.print(table)
    console.print(f"evaluated {result.images}/{result.total} unique images", highlight=False)
    console.print(f"preprocessing: {result.preprocess.describe()}", highlight=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if result.answers is not None:
        _show_weakest(console, result)
    for one in result.bad[:10]:
        console.print(f"left out {one.name}: {one.fault}", highlight=False, soft_wrap=True)
    if len(result.bad) > 10:
        console.print(f"and {len(result.bad) - 10} more images were left out", highlight=False)


def _show_weakest(console: Console, result: Measured) -> None:
    assert result.answers is not None
    each = per_class(result.answers.targets, result.answers.predicted, len(result.classes))
    weakest = sorted((float(each.f1[k]), name) for k, name in enumerate(result.classes) if each.support[k])[:3]
    if len(result.classes) > 3:
        words = ", ".join(f"{name} {value:.1%}" for value, name in weakest)
        console.print(f"lowest F1: {words}", highlight=False, soft_wrap=True)
