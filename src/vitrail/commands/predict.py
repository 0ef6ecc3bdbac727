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
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError, counted
from vitrail.files import atomic_file
from vitrail.text import csv_line, printable, to_bytes, to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle, Prediction
    from vitrail.evaluate.predictor import ImagePredictions


def predict(
    words: CheckpointAndImages,
    /,
    *,
    top: int = 5,
    csv_: Annotated[Path | None, tyro.conf.arg(name="csv")] = None,
    overwrite: bool = False,
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

    Args:
        words: First, if given, the checkpoint: a run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16,
            hf:owner/name or an included model. Then image files, folders (searched recursively), or .txt files with one path per
            line.
        top: How many predictions per image.
        csv_: Write a table to this file; - is the standard output.
        overwrite: Replace an existing file.
        json_: Print one JSON object per line; each says what was assumed about a file that does not show it.
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
        raise VitrailError("No image was given. Pass image files, folders of images, or .txt files that list images.")
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
        for one in predict_images(bundle, split, top=top, context=replace(context, progress=advance)):
            write(one)
            if one.error is not None:
                bad += 1
                console.print(printable(f"{one.name}: {one.error}", one_line=True), style="red", highlight=False, soft_wrap=True)
    if bad:
        console.print(f"{bad} of {counted(len(split), 'image')} could not be read.", highlight=False)
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
    form = ".5g" if bundle.task == "regress" else ".1%"
    chosen, rest = ([f"{p.label} {p.score:{form}}" for p in one.predictions if p.chosen is yes] for yes in (True, False))
    below = f"; below the threshold: {', '.join(rest)}" if rest else ""
    return f"{one.name}: {', '.join(chosen) or 'no label'}{below}"


def _to_dict(one: ImagePredictions, bundle: Bundle) -> dict[str, Any]:
    if one.error is not None:
        return {"image": one.name, "error": one.error}
    key = "value" if bundle.task == "regress" else "probability"
    predictions: list[dict[str, Any]] = [{"label": p.label, "index": p.index, key: p.score} for p in one.predictions]
    if bundle.task == "multilabel":
        for prediction, p in zip(predictions, one.predictions, strict=True):
            prediction["above_threshold"] = p.chosen
    assumed = {"assumptions": bundle.report.assumptions} if bundle.report.assumptions else {}
    return {"image": one.name, "predictions": predictions, **assumed}


class _CsvWriter:
    """Write one row per image: its predictions, or the error."""

    def __init__(self, stream: TextIO, bundle: Bundle, top: int) -> None:
        self._stream, self._bundle = stream, bundle
        outputs = bundle.model.config.outputs
        if bundle.task == "regress":
            headings = [bundle.label(k) for k in range(outputs)]
        else:
            columns = ("label", "probability", *(("above_threshold",) if bundle.task == "multilabel" else ()))
            headings = [f"{name}_{k}" for k in range(1, min(top, outputs) + 1) for name in columns]
        self._width = len(headings)
        self._write(["image", *headings, "error"])

    def __call__(self, one: ImagePredictions) -> None:
        if one.error is not None:
            cells = [""] * self._width
        elif self._bundle.task == "regress":
            cells = [f"{prediction.score:.7g}" for prediction in one.predictions]
        else:
            cells = [cell for prediction in one.predictions for cell in self._cells(prediction)]
        self._write([one.name, *cells, one.error or ""])

    def _cells(self, prediction: Prediction) -> tuple[str, ...]:
        chosen = (str(int(prediction.chosen)),) if self._bundle.task == "multilabel" else ()
        return prediction.label, f"{prediction.score:.6f}", *chosen

    def _write(self, cells: list[str]) -> None:
        line = csv_line(cells)
        self._stream.write(printable(line) if self._stream.isatty() else to_bytes(line).decode("utf-8", "surrogateescape"))
