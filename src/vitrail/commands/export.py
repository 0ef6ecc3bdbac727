"""`vitrail export` and `vitrail export verify`: models for other runtimes."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail.commands.options import Checkpoint, Json, show_assumptions, show_trained_on
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError, counted
from vitrail.export.settings import MAX_DROP, ExportSettings
from vitrail.text import printable, to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle


Settings = Annotated[ExportSettings, tyro.conf.arg(name="")]
Out = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]


def export(
    checkpoint: Checkpoint,
    out: Out,
    /,
    *,
    settings: Settings = ExportSettings(),  # noqa: B008 - it is frozen
    data: str | None = None,
    split: str | None = None,
    images: int = 256,
    calibrate: str | None = None,
    calibrate_split: str = "train",
    calibrate_images: int = 128,
    max_drop: float = MAX_DROP,
    preprocess: str | None = None,
    force: bool = False,
    json_: Json = False,
) -> None:
    """Export a model as an ONNX file or a torch.export program, and compare it with the PyTorch model on real images.

    OUT is a folder with the model and report.json. Class names and preprocessing are stored in the file. If the logits differ
    more than the precision explains, nothing is written. `vitrail export verify` repeats the comparison.

    Example: vitrail export runs/pets pets-onnx --data folder:pets

    Example: vitrail export runs/pets pets-int8 --precision int8 --calibrate folder:pets --data folder:pets

    Example: vitrail export verify pets-onnx runs/pets --data folder:pets

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16, hf:owner/name or an included model.
        out: The folder to write.
        settings: What is written.
        data: Images to compare on; with labels, accuracies are compared, too. None: crops of two photos.
        split: Which split of --data; default: as in `vitrail eval`, the one the run validated on, else val.
        images: How many of these images, spread evenly.
        calibrate: Images to measure the ranges of activations with; needed for int8.
        calibrate_split: Which split of --calibrate.
        calibrate_images: How many of these images.
        preprocess: The preprocessing the weights expect, if the checkpoint does not store it: google-vit, timm, imagenet, …
        max_drop: Most accuracy that may be lost, as a fraction, where --data has labels of the model's classes.
        force: Write the model even if it differs too much; report.json says so.
        json_: Print the report as JSON.
    """
    from vitrail.checkpoints import load
    from vitrail.export.write import check_target, export_model

    check_place(out)
    check_target(out)
    if settings.precision == "int8" and calibrate is None:
        raise VitrailError("int8 needs images to measure the ranges of activations with: give a data source with --calibrate.")
    _check_drop(max_drop)
    bundle = load(checkpoint, preprocess=preprocess)
    bundle.check_head()
    show_assumptions(bundle)
    examples, labels, name = _images(bundle, data, split, images, rectangles=settings.resize_in_graph)
    ranges = () if calibrate is None else _images(bundle, calibrate, calibrate_split, calibrate_images, measured=False)[0]
    with Console(stderr=True).status(f"exporting, then comparing on {counted(len(examples), 'image')}"):
        comparison = export_model(
            bundle, out, settings, images=examples, labels=labels, data=name, calibrate=ranges, max_drop=max_drop, force=force
        )
    if json_:
        say((out / "report.json").read_text(encoding="utf-8").rstrip("\n"))
        return
    console = Console()
    console.print(f"{settings.format}, {settings.precision}: {comparison.describe()}", highlight=False, soft_wrap=True)
    for problem in comparison.problems(settings.precision, max_drop):
        console.print(f"warning: {problem}", style="yellow", highlight=False)
    size = sum(path.stat().st_size for path in out.iterdir())
    given = {"--data": data, "--split": split, "--images": str(images)} if data is not None else {}
    options = [word for name, value in {**given, "--preprocess": preprocess}.items() if value is not None for word in (name, value)]
    again = shlex.join(["vitrail", "export", "verify", str(out), checkpoint, *options])
    console.print(f"written to {out} ({size / 1e6:.1f} MB); check it again with: {again}", highlight=False, soft_wrap=True)


def verify(
    artefact: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="EXPORTED")],
    checkpoint: Checkpoint,
    /,
    *,
    data: str | None = None,
    split: str | None = None,
    images: int = 256,
    max_drop: float = MAX_DROP,
    preprocess: str | None = None,
    blocks: bool = False,
    json_: Json = False,
) -> int:
    """Compare an exported model with a checkpoint again, on this machine and with other images; exit status 1 if they differ.

    Example: vitrail export verify pets-onnx runs/pets --data folder:pets

    Args:
        artefact: A folder that `vitrail export` wrote, or the file in it.
        checkpoint: The checkpoint it was exported from.
        data: Images to compare on. None: crops of two photos.
        split: Which split of --data; default: as in `vitrail eval`, the one the run validated on, else val.
        images: How many of these images, spread evenly.
        max_drop: Most accuracy that may be lost, as a fraction, where --data has labels of the model's classes.
        preprocess: The preprocessing the weights expect, if the checkpoint does not store it.
        blocks: Compare the output of every block, too. If a limit is missed, this is done in any case.
        json_: Print JSON.
    """
    from vitrail.checkpoints import load
    from vitrail.export.artefact import Artefact
    from vitrail.export.blocks import block_errors, describe
    from vitrail.export.verify import compare

    _check_drop(max_drop)
    opened = Artefact.open(artefact)
    bundle = load(checkpoint, preprocess=preprocess)
    show_assumptions(bundle)
    own, stored = opened.preprocess, bundle.stored_preprocess()
    if own is not None and (own.size != bundle.model.config.image_size or own.size != stored.size):  # a ResNet accepts several
        resized = stored.with_size(own.size)
        bundle.model.resize(own.size)
        bundle = dataclasses.replace(bundle, preprocess=resized)
    examples, labels, name = _images(bundle, data, split, images, rectangles=opened.metadata["input"] == "images")
    with Console(stderr=True).status(f"comparing on {counted(len(examples), 'image')}"):
        comparison = compare(bundle, opened, examples, labels, data=name)
        precision = str(opened.metadata["precision"])
        problems = comparison.problems(precision, max_drop)
        errors = block_errors(bundle, opened, examples) if problems or blocks else None
    if json_:
        say(to_json({**dataclasses.asdict(comparison), "problems": problems, "blocks": errors}, indent=2))
        return 1 if problems else 0
    console = Console()
    console.print(comparison.describe(), highlight=False, soft_wrap=True)
    console.print("\n".join(problems) if problems else "the exported model computes what the checkpoint does", highlight=False)
    if errors is not None:
        if blocks:
            lines = [f"{name}: {error:.2g}" for name, error in errors.items()]
            console.print("\n".join(["relative differences of blocks", *lines]), highlight=False)
        console.print(describe(errors, precision), highlight=False, soft_wrap=True)
    return 1 if problems else 0


def _check_drop(max_drop: float) -> None:
    if not 0 <= max_drop <= 1:
        raise VitrailError(f"--max-drop is {max_drop}; it must be a fraction from 0 to 1, such as 0.01.")


def _images(
    bundle: Bundle, reference: str | None, name: str | None, count: int, *, measured: bool = True, rectangles: bool = False
) -> tuple[list[Any], list[int] | None, str]:
    """Return images, their labels and what they are. The source is divided as for training; where the accuracy is `measured` on
    images that the model was trained on, or cannot be, a message says so. `rectangles`: see `sample_photos`."""
    from vitrail.data.trained_on import evaluation_split, open_for, overlap
    from vitrail.export.verify import SAMPLE_NAME, images_of, sample_photos

    if count < 1:
        option = "--images" if measured else "--calibrate-images"
        raise VitrailError(f"{option} is {count}; it must be at least 1.")
    if reference is None:
        return sample_photos(channels=bundle.model.config.channels, rectangles=rectangles), None, SAMPLE_NAME
    source = open_for(bundle.trained_on, reference)
    split = evaluation_split(bundle.trained_on, source, name)
    examples, labels = images_of(split, count, bundle.classes)
    if measured and labels is not None:
        show_trained_on(Console(stderr=True), overlap(bundle.trained_on, source, split))
    if measured and labels is None and split.task == "classify" and bundle.task == "classify":
        other = next((label for label in split.classes if label not in (bundle.classes or ())), "")
        reason = f"it has no class {printable(other, one_line=True)!r}" if bundle.classes else "its classes have no names"
        note = f"accuracies are not compared: the labels of {reference} are not those of the model ({reason})"
        Console(stderr=True).print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)
    return examples, labels, f"{reference}, split {split.name}"
