"""`vitrail predict`: predict the classes of images."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro
from rich.console import Console

from vitrail.checkpoints import Bundle
from vitrail.commands.options import Checkpoint, Images, Json, Options, RunOptions, progress_bar
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.predictor import ImagePredictions, find_images
from vitrail.evaluate.predictor import predict as predict_images
from vitrail.files import atomic_file
from vitrail.train.parallel import World, choose_device


def predict(
    checkpoint: Checkpoint,
    images: Images,
    /,
    *,
    top: int = 5,
    csv_: Annotated[Path | None, tyro.conf.arg(name="csv")] = None,
    json_: Json = False,
    options: Options = RunOptions(bad_images="skip", precision="auto"),  # noqa: B008 - it is frozen
) -> int:
    """Predict the most probable classes of images, one image per line, as soon as each batch is finished.

    On a CPU with fast int8 or bf16 instructions the model runs in that precision and prints a note; --precision fp32 is exact.
    An image that cannot be read is reported and skipped; the exit status is then 1 (--bad-images error stops instead).

    Example: vitrail predict runs/pets cat.jpg holiday/ --top 3

    Example: vitrail predict runs/pets list.txt --csv predictions.csv

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, or hf:owner/name.
        images: Image files, folders (searched recursively), or .txt files with one path per line.
        top: How many predictions per image.
        csv_: Write a table to this file; - is the standard output.
        json_: Print one JSON object per line.
        options: How images are loaded and computed.
    """
    if csv_ is not None and json_:
        raise VitrailError("--csv and --json were both given; choose one.")
    if not images:
        raise VitrailError("No image was given. Pass image files, folders of images, or .txt files that list images.")
    world = World(choose_device(options.device))
    bundle = options.bundle(checkpoint, world)
    split = find_images(images)
    bad, console, context = 0, Console(stderr=True), options.eval_context(world)
    if (note := context.precision_note(bundle.model)) is not None:
        console.print(note, highlight=False, soft_wrap=True)
    with _output(csv_) as stream, progress_bar(console, "predicting", len(split), hidden=stream.isatty()) as advance:
        write = _writer(stream, bundle, top, csv_ is not None, json_)
        for one in predict_images(bundle, split, top=top, context=replace(context, progress=advance)):
            write(one)
            if one.error is not None:
                bad += 1
                console.print(f"{one.name}: {one.error}", style="red", highlight=False, markup=False, soft_wrap=True)
    if bad:
        console.print(f"{bad} of {counted(len(split), 'image')} could not be read.", highlight=False)
    return 1 if bad else 0


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None or str(path) == "-":
        yield sys.stdout
        return
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        yield stream


def _writer(stream: TextIO, bundle: Bundle, top: int, as_csv: bool, as_json: bool) -> Callable[[ImagePredictions], None]:
    if as_csv:
        return _CsvWriter(stream, bundle, top)
    if as_json:
        return lambda one: print(json.dumps(_to_dict(one, bundle), ensure_ascii=False), file=stream, flush=True)
    return lambda one: print(_line(one, bundle), file=stream, flush=True) if one.error is None else None


def _line(one: ImagePredictions, bundle: Bundle) -> str:
    form = ".5g" if bundle.task == "regress" else ".1%"
    return f"{one.name}: {', '.join(f'{prediction.label} {prediction.score:{form}}' for prediction in one.predictions)}"


def _to_dict(one: ImagePredictions, bundle: Bundle) -> dict[str, Any]:
    if one.error is not None:
        return {"image": one.name, "error": one.error}
    key = "value" if bundle.task == "regress" else "probability"
    predictions: list[dict[str, Any]] = [{"label": p.label, "index": p.index, key: p.score} for p in one.predictions]
    thresholds = bundle.task_info.get("thresholds")
    if bundle.task == "multilabel" and thresholds is not None:
        for prediction in predictions:
            prediction["above_threshold"] = prediction[key] >= thresholds[prediction["index"]]
    return {"image": one.name, "predictions": predictions}


class _CsvWriter:
    """Write one row per image: its predictions, or the error."""

    def __init__(self, stream: TextIO, bundle: Bundle, top: int) -> None:
        self._rows, self._bundle = csv.writer(stream, lineterminator="\n"), bundle
        outputs = bundle.model.config.outputs
        if bundle.task == "regress":
            headings = [bundle.label(k) for k in range(outputs)]
        else:
            headings = [name for k in range(1, min(top, outputs) + 1) for name in (f"label_{k}", f"probability_{k}")]
        self._width = len(headings)
        self._rows.writerow(["image", *headings, "error"])

    def __call__(self, one: ImagePredictions) -> None:
        if one.error is not None:
            cells = [""] * self._width
        elif self._bundle.task == "regress":
            cells = [f"{prediction.score:.7g}" for prediction in one.predictions]
        else:
            cells = [cell for prediction in one.predictions for cell in (prediction.label, f"{prediction.score:.6f}")]
        self._rows.writerow([one.name, *cells, one.error or ""])
