"""`vitrail predict`: names and probabilities for images."""

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
from vitrail.errors import VitrailError
from vitrail.evaluate.predicting import Predicted, find_images
from vitrail.evaluate.predicting import predict as predict_images
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
    """Say what is in images: the most probable classes of each, one image a line, as soon as they are known.

    On a processor with instructions for it the model is computed in int8 or bf16, which is said; --precision fp32 is exact.
    An image that cannot be read is reported and passed over; the exit status is then 1 (--bad-images error stops instead).

    Example: vitrail predict runs/pets cat.jpg holiday/ --top 3

    Example: vitrail predict runs/pets list.txt --csv answers.csv

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, or hf:owner/name.
        images: Image files, folders (searched to the bottom), or .txt files with a path a line.
        top: How many answers for an image.
        csv_: Write a table to this file; - is the standard output.
        json_: Print a JSON object a line for a program.
        options: How images are read and computed.
    """
    if csv_ is not None and json_:
        raise VitrailError("--csv and --json were both given; choose one of them.")
    if not images:
        raise VitrailError("No image was given. Name image files, folders of them, or .txt files that list them.")
    world = World(choose_device(options.device))
    split = find_images(images)
    bundle = options.bundle(checkpoint, world)
    bad, console, running = 0, Console(stderr=True), options.running(world)
    if (remark := running.remark(bundle.model)) is not None:
        console.print(remark, highlight=False, soft_wrap=True)
    with _output(csv_) as stream, progress_bar(console, "predicting", len(split), hidden=stream.isatty()) as advance:
        write = _writer(stream, bundle, top, csv_ is not None, json_)
        for one in predict_images(bundle, split, top=top, running=replace(running, progress=advance)):
            write(one)
            if one.fault is not None:
                bad += 1
                console.print(f"{one.name}: {one.fault}", style="red", highlight=False, markup=False, soft_wrap=True)
    if bad:
        words = f"{bad} of {len(split)} images could not be read and {'has' if bad == 1 else 'have'} no prediction."
        console.print(words, highlight=False)
    return 1 if bad else 0


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None or str(path) == "-":
        yield sys.stdout
        return
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        yield stream


def _writer(stream: TextIO, bundle: Bundle, top: int, as_csv: bool, as_json: bool) -> Callable[[Predicted], None]:
    if as_csv:
        return _CsvWriter(stream, bundle, top)
    if as_json:
        return lambda one: print(json.dumps(_plain(one, bundle), ensure_ascii=False), file=stream, flush=True)
    return lambda one: print(_line(one, bundle), file=stream, flush=True) if one.fault is None else None


def _line(one: Predicted, bundle: Bundle) -> str:
    if bundle.task == "regress":
        return f"{one.name}: {', '.join(f'{answer.label} {answer.score:.5g}' for answer in one.answers)}"
    return f"{one.name}: {', '.join(f'{answer.label} {answer.score:.1%}' for answer in one.answers)}"


def _plain(one: Predicted, bundle: Bundle) -> dict[str, Any]:
    if one.fault is not None:
        return {"image": one.name, "error": one.fault}
    value = "value" if bundle.task == "regress" else "probability"
    answers: list[dict[str, Any]] = [{"label": answer.label, "index": answer.index, value: answer.score} for answer in one.answers]
    thresholds = bundle.reading.get("thresholds")
    if bundle.task == "multilabel" and thresholds is not None:
        for answer in answers:
            answer["given"] = answer[value] >= thresholds[answer["index"]]
    return {"image": one.name, "answers": answers}


class _CsvWriter:
    """A row an image: the answers side by side, and what is wrong with an image that has none."""

    def __init__(self, stream: TextIO, bundle: Bundle, top: int) -> None:
        self._rows, self._bundle = csv.writer(stream, lineterminator="\n"), bundle
        outputs = bundle.model.config.outputs
        if bundle.task == "regress":
            headings = [bundle.label(k) for k in range(outputs)]
        else:
            headings = [word for k in range(1, min(top, outputs) + 1) for word in (f"label_{k}", f"probability_{k}")]
        self._width = len(headings)
        self._rows.writerow(["image", *headings, "error"])

    def __call__(self, one: Predicted) -> None:
        if one.fault is not None:
            cells = [""] * self._width
        elif self._bundle.task == "regress":
            cells = [f"{answer.score:.7g}" for answer in one.answers]
        else:
            cells = [word for answer in one.answers for word in (answer.label, f"{answer.score:.6f}")]
        self._rows.writerow([one.name, *cells, one.fault or ""])
