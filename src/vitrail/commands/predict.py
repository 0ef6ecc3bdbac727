"""`vitrail predict`: predict the classes of images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.commands.default_model import default_note, split_checkpoint
from vitrail.commands.options import CheckpointAndImages, Json, Options, RunOptions, progress_bar
from vitrail.commands.output import check_output_file
from vitrail.commands.shards import (
    ShardSettings,
    check_shard_folder,
    is_folder,
    predict_to_folder,
    refuse_ranks,
    refuse_shard_options,
)
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.settings import TableFormat
from vitrail.files import atomic_file
from vitrail.text import csv_line, printable, to_bytes, to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle
    from vitrail.evaluate.predictor import ImagePredictions


def predict(
    words: CheckpointAndImages,
    /,
    *,
    top: int = 5,
    tta: bool = False,
    csv_: Annotated[Path | None, tyro.conf.arg(name="csv")] = None,
    overwrite: bool = False,
    out: Path | None = None,
    format_: Annotated[TableFormat, tyro.conf.arg(name="format")] = "csv",
    shard_size: int = 10_000,
    json_: Json = False,
    options: Options = RunOptions(bad_images="skip", precision="auto"),  # noqa: B008 - it is frozen
) -> int:
    """Predict the most probable classes of images, one image per line, as soon as each batch is finished.

    On a CPU with fast int8 or bf16 instructions the model runs in that precision and prints a note; --precision fp32 is exact.
    A multi-label model prints the labels that reach their thresholds first, and then those below.
    An image that cannot be read is reported and skipped; the exit status is then 1 (--bad-images error stops instead).

    Without a checkpoint the included model vitrail-ti8-tiny-imagenet is used: 200 classes, images of 64×64 pixels.

    Example: vitrail predict cat.jpg

    Example: vitrail predict runs/pets cat.jpg holiday/ --top 3

    Example: vitrail predict runs/pets list.txt --csv predictions.csv

    With --out, millions of images: predictions are written to a folder of shards, by one process or, under torchrun, by many GPUs
    and machines. Running it again after it was interrupted computes only the shards that are missing.

    Example: torchrun --nproc-per-node 8 -m vitrail predict runs/pets 'wds:photos/*.tar' --out predictions --format parquet

    Args:
        words: First, if given, the checkpoint: a run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16,
            hf:owner/name or an included model. Then image files, folders (searched recursively), .txt files with one path per
            line, or data sources such as csv:FILE, wds:PATTERN (also of URLs) or packed:DIR.
        top: How many predictions per image.
        tta: Test-time augmentation: average the probabilities of each image and its mirror image. Takes twice as long.
        csv_: Write a table to this file; - is the standard output.
        overwrite: Replace an existing file.
        out: Write a folder of shards instead, with a manifest.
        format_: File format of the shards.
        shard_size: Images per shard.
        json_: Print one JSON object per line; each says what was assumed about a file that does not show it. With --out, a summary.
        options: How images are loaded and computed.
    """
    from vitrail.evaluate.predictor import find_images
    from vitrail.evaluate.predictor import predict as predict_images
    from vitrail.train.parallel import World, choose_device

    if csv_ is not None and json_:
        raise VitrailError("--csv and --json were both given; choose one.")
    check_output_file(csv_, overwrite=overwrite)
    checkpoint, images = split_checkpoint(words)
    if not images:
        taken = "" if checkpoint is None else f", only {checkpoint}, which is read as the checkpoint"
        raise VitrailError(f"No image was given{taken}. Pass image files, folders of images, or .txt files that list images.")
    if out is not None:
        if csv_ is not None:
            raise VitrailError("--out and --csv were both given; choose one. --out FOLDER --format csv writes shards of CSV files.")
        if tta:
            raise VitrailError("--tta is not available for shards yet; leave out --tta, or write one file with --csv.")
        if not is_folder(out):
            raise VitrailError(f"--out is a folder of shards, but {out.name!r} has the suffix of a file. For one file use --csv.")
        check_shard_folder(out, overwrite=overwrite)
        common: dict[str, Any] = {"images": images, "out": out, "size": shard_size, "options": options, "json": json_}
        settings = ShardSettings(checkpoint=checkpoint or DEFAULT, default_model=checkpoint is None, **common)
        return predict_to_folder(settings, top, format_)
    refuse_shard_options(format_, shard_size, ("csv", 10_000))
    refuse_ranks(csv_)
    world = World(choose_device(options.device))
    bundle = options.bundle(checkpoint or DEFAULT, world)
    split = find_images(images)
    bad, console, context = 0, Console(stderr=True), options.eval_context(world)
    if checkpoint is None:
        console.print(default_note(bundle), highlight=False, soft_wrap=True)
    if (note := context.precision_note(bundle.model)) is not None:
        console.print(note, highlight=False, soft_wrap=True)
    with _output(csv_) as stream, progress_bar(console, "predicting", len(split), hidden=stream.isatty()) as advance:
        write = _writer(stream, bundle, top, csv_ is not None, json_)
        for one in predict_images(bundle, split, top=top, tta=tta, context=replace(context, progress=advance)):
            write(one)
            if one.error is not None:
                bad += 1
                console.print(printable(f"{one.name}: {one.error}", one_line=True), style="red", highlight=False, soft_wrap=True)
    if bad:
        console.print(f"{bad} of {counted(len(split), 'image')} could not be read.", highlight=False)
    if csv_ is not None and str(csv_) != "-":
        console.print(
            f"wrote {csv_}: a row for each of {counted(len(split), 'image')}", highlight=False, soft_wrap=True, markup=False
        )
    return 1 if bad else 0


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None or str(path) == "-":
        if path is not None and hasattr(sys.stdout, "reconfigure") and not sys.stdout.isatty():
            sys.stdout.reconfigure(errors="surrogateescape")  # the names of a table keep their bytes
        yield sys.stdout
        return
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        yield stream


def _writer(stream: TextIO, bundle: Bundle, top: int, as_csv: bool, as_json: bool) -> Callable[[ImagePredictions], None]:
    if as_csv:
        return _CsvWriter(stream, bundle, top)
    if as_json:
        return lambda one: say(to_json(_to_dict(one, bundle)), file=stream, flush=True)
    return lambda one: say(printable(_line(one, bundle), one_line=True), file=stream, flush=True) if one.error is None else None


def _line(one: ImagePredictions, bundle: Bundle) -> str:
    from vitrail.api.predictions import predictions_text

    return f"{one.name}: {predictions_text(one.predictions, bundle.task)}"


def _to_dict(one: ImagePredictions, bundle: Bundle) -> dict[str, Any]:
    from vitrail.api.predictions import prediction_dict

    if one.error is not None:
        return {"image": one.name, "error": one.error}
    assumed = {"assumptions": bundle.report.assumptions} if bundle.report.assumptions else {}
    return {**prediction_dict(one.name, one.predictions, bundle.task), **assumed}


class _CsvWriter:
    """Write one row per image: its predictions, or the error."""

    def __init__(self, stream: TextIO, bundle: Bundle, top: int) -> None:
        from vitrail.evaluate.prediction_table import PredictionTable

        self._stream, self._table = stream, PredictionTable(bundle, top)
        self._write(self._table.headings)

    def __call__(self, one: ImagePredictions) -> None:
        self._write(self._table.cells(one))

    def _write(self, cells: list[str]) -> None:
        line = csv_line(cells)
        self._stream.write(printable(line) if self._stream.isatty() else to_bytes(line).decode("utf-8", "surrogateescape"))
