"""`vitrail inspect`: the paper's figures for any checkpoint, in a folder with a page that shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from vitrail.checkpoints import load
from vitrail.commands.options import Json
from vitrail.errors import VitrailError
from vitrail.inspect.images import RawImages, from_files, from_source, views
from vitrail.inspect.reconstruction import examine_reconstruction, own_source
from vitrail.inspect.report import INDEX, InspectOptions, Section, check_output_folder, compare, examine, write_report
from vitrail.train.parallel import choose_device


def inspect(
    checkpoint: Annotated[str, tyro.conf.Positional],
    images: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    /,
    *,
    out: Path,
    what: Literal["figures", "reconstruction"] = "figures",
    data: str | None = None,
    split: str | None = None,
    count: int = 128,
    show: int = 16,
    seed: int = 0,
    compare_with: Annotated[tuple[str, ...], tyro.conf.arg(name="compare")] = (),
    layers: tuple[int, ...] = (),
    patch: tuple[int, int] | None = None,
    image_size: tuple[int, ...] = (),
    preprocess: str | None = None,
    batch: int | None = None,
    device: str = "auto",
    overwrite: bool = False,
    json_: Json = False,
) -> None:
    """Look inside a checkpoint: every figure of the paper that fits it, as PNG and SVG, with the numbers as NPZ and CSV.

    Weights alone give the first-layer filters (28 principal components, and raw) and the similarity of position embeddings.
    With images come the mean attention distance, attention rollout, what each head attends to from a chosen patch, and, marked as
    not in the paper, gradient-weighted rollout and token similarity.

    Attention distance: for every patch as query, the Euclidean distance on the token grid to every patch as key, in pixels of the
    input, averaged with the attention as weight; then the mean over queries and images, for each layer and head. Attention to
    prefix tokens (class, distillation, registers) is left out and the rest sums to one; the file also holds the other convention,
    in which it counts as distance 0.

    Rollout: the mean over heads, ½A + ½I, rows that sum to one, multiplied from the output through all layers.

    Example: vitrail inspect runs/pets cat.jpg dog.jpg --out pets-inside

    Example: vitrail inspect B_16.npz --preprocess google-vit --data folder:imagenet --out b16

    Example: vitrail inspect runs/scratch --compare runs/finetuned --data folder:pets --out before-after

    Example: vitrail inspect runs/masked-patch-tiny-imagenet --what reconstruction --out painted

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, or hf:owner/name.
        images: Image files to look at.
        out: The folder to make; index.html in it shows everything.
        what: The figures above; or, of a run that learnt without labels, what it makes of hidden patches: the original, what
            was hidden and what is predicted, side by side. Without images, those are taken from the run's own data.
        data: Take images from a source such as folder:DIR, csv:FILE or torchvision:CIFAR10 instead.
        split: Which split of the source; val, or else test, if not said.
        count: How many images of the source to average over, drawn at random.
        show: How many images to draw maps of.
        seed: Decides which images of the source are drawn.
        compare_with: More checkpoints to put beside the first in one figure: before and after fine-tuning, for instance.
        layers: Only these layers for distance and heads, counted from 0; negative ones from the end.
        patch: Row and column of the patch whose heads are drawn, counted from 0; the middle one if not said.
        image_size: Look at this input size: one number, or height and width. Positions are resampled.
        preprocess: A preset (google-vit, big-vision, timm, imagenet, cifar) in place of the checkpoint's own preprocessing.
        batch: Images at a time; as many as fit about 1 GiB of attention if not said. It changes no result.
        device: Where to compute: auto, cpu, cuda or mps.
        overwrite: Replace an inspection that is there already.
        json_: Print what was made as JSON for a program.
    """
    console = Console(stderr=json_)
    check_output_folder(out, overwrite)
    if show < 1:
        raise VitrailError(f"--show is {show}; at least one image must be drawn.")
    size = _size(image_size)
    if what == "reconstruction":
        _check_runs((checkpoint, *compare_with))
        data, count = (data if data or images else own_source(checkpoint)), min(count, show)
        _check_reconstruction(data, images, size)
    originals = _originals(images, data, split, count, seed)
    references = (checkpoint, *compare_with)
    names = short_names(references)
    options = InspectOptions(layers=layers or None, patch=patch, batch=batch)
    bundles, seen, sections = [], [], []
    with console.status("loading") as status:
        for reference, name in zip(references, names, strict=True):
            bundle = load(reference, preprocess=preprocess, device=choose_device(device), image_size=size)
            view = views(bundle, originals, show) if originals is not None else None
            folder = "." if len(references) == 1 else re.sub(r"[^A-Za-z0-9._+-]+", "-", name)
            step = lambda words, name=name: status.update(f"{name}: {words}")  # noqa: E731
            if what == "reconstruction":
                assert view is not None
                sections.append(examine_reconstruction(name, folder, reference, bundle, view, seed))
            else:
                sections.append(examine(name, folder, bundle, view, options, step))
            bundles.append(bundle)
            seen.append(view)
        status.update("drawing")
        together = compare(sections, bundles, seen) if what == "figures" else None
        everything = [together, *sections] if together is not None else sections
        about = {"checkpoints": list(references), "titles": names, "data": data, "version": version("vitrail")}
        write_report(out, everything, {**about, "images": originals.names if originals else []})
    _tell(console, everything, out, json_)


def _originals(images: tuple[Path, ...], data: str | None, split: str | None, count: int, seed: int) -> RawImages | None:
    if images and data is not None:
        raise VitrailError("Both image files and --data were given; give one of the two.")
    if data is not None:
        if count < 1:
            raise VitrailError(f"--count is {count}; at least one image must be looked at.")
        return from_source(data, split, count, seed)
    return from_files(images) if images else None


def _check_runs(references: tuple[str, ...]) -> None:
    missing = next((one for one in references if not Path(one).is_dir()), None)
    if missing is not None:
        raise VitrailError(
            f"There is no folder {missing}. Reconstructions need that of a run with --task.kind masked-patch or masked-autoencoder."
        )


def _check_reconstruction(data: str | None, images: tuple[Path, ...], size: int | tuple[int, int] | None) -> None:
    if data is None and not images:
        raise VitrailError("Which images to hide patches of is not said: give image files, or --data such as folder:DIR.")
    if size is not None:
        raise VitrailError("--image-size cannot be changed for reconstructions: the prediction head fits the trained size alone.")


def _size(numbers: tuple[int, ...]) -> int | tuple[int, int] | None:
    if len(numbers) > 2:
        raise VitrailError(f"--image-size takes one number, or height and width; {len(numbers)} numbers were given.")
    return None if not numbers else numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def short_names(references: Sequence[str]) -> list[str]:
    """The end of each reference that tells it from the others: `runs/a/model` and `runs/b/model` are a and b."""
    parts = [[part for part in Path(reference).parts if part not in ("/", "model")] or [reference] for reference in references]
    if len({tuple(one) for one in parts}) < len(parts):
        raise VitrailError(f"The same checkpoint was given twice: {', '.join(references)}. Comparing needs different ones.")
    length = 1
    while len({tuple(one[-length:]) for one in parts}) < len(parts):
        length += 1
    return ["/".join(one[-length:]) for one in parts]


def _tell(console: Console, sections: Sequence[Section], out: Path, as_json: bool) -> None:
    if as_json:
        made = {one.folder: {"figures": [shown.name for shown in one.figures], "notes": one.notes} for one in sections}
        print(json.dumps({"index": str(out / INDEX), "sections": made}, indent=2, ensure_ascii=False))  # noqa: T201
        return
    for section in sections:
        names = ", ".join(shown.heading.lower() for shown in section.figures)
        console.print(f"[bold]{section.title}[/bold]: {names}", highlight=False, soft_wrap=True)
        for note in section.notes:
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
    console.print(f"figures: {out / INDEX}", highlight=False, soft_wrap=True)
