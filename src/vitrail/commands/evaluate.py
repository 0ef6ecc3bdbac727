"""`vitrail eval`: evaluate a checkpoint on labelled images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from vitrail.commands.options import (
    DEFAULT,
    Checkpoint,
    Json,
    Options,
    data_or_own,
    progress_bar,
    show_skipped,
    show_trained_on,
)
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError
from vitrail.evaluate.settings import Match
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.data.types import Split
    from vitrail.evaluate.evaluator import EvalResult


def evaluate(
    checkpoint: Checkpoint,
    /,
    *,
    data: str | None = None,
    split: str | None = None,
    image_sizes: tuple[int, ...] = (),
    real: Path | None = None,
    match: Match = "name",
    ignore_unknown_classes: bool = False,
    tta: bool = False,
    out: Path | None = None,
    overwrite: bool = False,
    options: Options = DEFAULT,
    json_: Json = False,
) -> None:
    """Evaluate a checkpoint on labelled images: accuracy, calibration and confusions; mAP for multi-label, MAE for regression.

    Every image counts exactly once, for any batch size, workers or ranks (torchrun). Metrics have 95 % confidence intervals.
    A source that the run was trained on is divided as in training; images that it was trained on are counted in a warning.

    Example: vitrail eval runs/pets --data folder:pets --out pets-report

    Example: vitrail eval B_16.npz --data folder:imagenet --image-sizes 224 384 --real real.json --match order

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16 or hf:owner/name.
        data: A source such as folder:DIR, csv:FILE, packed:DIR, torchvision:CIFAR10 or hf:NAME. Default: that of the run.
        split: Which split; default: val, else test, else the images that the run held out (holdout).
        image_sizes: Evaluate at these input sizes in pixels; position embeddings are resampled for each.
        real: A JSON file of reassessed labels, such as ImageNet ReaL's real.json. Images without labels are skipped and counted.
        match: Match the dataset's classes to the model's outputs by name or by order.
        ignore_unknown_classes: Skip images of classes that the checkpoint does not have.
        tta: Test-time augmentation: average the probabilities of each image and its mirror image. Takes twice as long.
        out: Write a report to this folder: report.html, confusion.png and .csv, per-class.csv, predictions.csv, metrics.json.
        overwrite: Replace an existing report.
        options: How images are loaded and computed.
        json_: Print JSON instead of a table.
    """
    from vitrail.evaluate.evaluator import evaluate as evaluate_checkpoint
    from vitrail.evaluate.evaluator import open_data
    from vitrail.evaluate.real_labels import read_real
    from vitrail.train.parallel import joined

    console = Console(stderr=json_)
    if out is not None:
        from vitrail.evaluate.report import check_output_folder, write_report  # it draws, with matplotlib

        check_output_folder(out, overwrite)
        check_place(out)
    if image_sizes and options.image_size is not None:
        raise VitrailError("--image-size and --image-sizes were both given; choose one.")
    data = data_or_own(data, checkpoint, console)
    with joined(options.device) as world:
        bundle = options.bundle(checkpoint, world)
        bundle.check_head()
        skip = ignore_unknown_classes
        opened, seen = open_data(bundle, data, split, match=match, bad_images=options.bad_images, ignore_unknown=skip)
        truth = partial(read_real, real, classes=opened.classes) if real is not None else None
        input_sizes: tuple[int | None, ...] = image_sizes or (None,)
        with progress_bar(console, "evaluating", len(opened) * len(input_sizes), world) as advance:
            context = options.eval_context(world, advance)
            results = [
                evaluate_checkpoint(
                    bundle, opened, image_size=size, match=match, real=truth, tta=tta, context=context, trained_on=seen
                )
                for size in input_sizes
            ]
        if not world.main:
            return
    assumptions = bundle.report.assumptions
    about = {"checkpoint": checkpoint, "model": bundle.model.config.name, "data": data, "assumptions": assumptions}
    if out is not None:
        write_report(out, results, opened, about)
    if json_:
        say(to_json({**about, "split": opened.name, "results": [one.summary() for one in results]}, indent=2))
    else:
        _show_all(console, results, opened, out)


def _show_all(console: Console, results: list[EvalResult], split: Split, out: Path | None) -> None:
    for result in results:
        _show(console, result, split)
    if out is not None:
        console.print(f"report: {out / 'report.html'}", highlight=False, soft_wrap=True)


def _show(console: Console, result: EvalResult, split: Split) -> None:
    from vitrail.evaluate.report_page import METRIC_NAMES, format_metric, interval_text

    table = Table(box=box.SIMPLE_HEAD, title=f"{split.name} at {result.size[0]}×{result.size[1]}", title_justify="left")
    for heading in ("metric", "value", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for name, value in result.metrics.items():
        table.add_row(METRIC_NAMES[name], format_metric(name, value), interval_text(result, name))
    console.print(table)
    console.print(f"evaluated {result.images}/{result.total} unique images", highlight=False)
    console.print(f"preprocessing: {result.preprocess.describe()}", highlight=False, soft_wrap=True)
    show_trained_on(console, result.trained_on)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if result.predictions is not None:
        _show_lowest_f1(console, result)
    show_skipped(console, result.bad)


def _show_lowest_f1(console: Console, result: EvalResult) -> None:
    from vitrail.evaluate.classification import per_class

    assert result.predictions is not None
    scores = per_class(result.predictions.targets, result.predictions.predicted, len(result.classes))
    lowest = sorted((float(scores.f1[k]), name) for k, name in enumerate(result.classes) if scores.support[k])[:3]
    if len(result.classes) > 3:
        text = ", ".join(f"{name} {value:.1%}" for value, name in lowest)
        console.print(f"lowest F1: {text}", highlight=False, soft_wrap=True)
