"""`vitrail inspect`: draw the paper's figures for any checkpoint, in a folder with an HTML page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import tyro
from rich.text import Text

from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.commands.default_model import default_note, split_checkpoint
from vitrail.commands.options import Json
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle
    from vitrail.inspect.images import PreprocessedImages, RawImages
    from vitrail.inspect.report import InspectOptions, Section


def inspect(
    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT] [IMAGE|DIR|LIST.txt …]")] = (),
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
    """Inspect a checkpoint: draw the paper's figures that apply to it, as PNG and SVG, with the data as NPZ and CSV.

    Weights alone give the first-layer filters (28 principal components, and raw) and the similarity of position embeddings.
    With images: mean attention distance, attention rollout, the attention of each head from a chosen query patch, and two maps
    that are not in the paper (and marked so), gradient-weighted rollout and token similarity.

    Mean attention distance: for every query patch, the Euclidean distance to every key patch in pixels of the input, averaged
    with the attention as weight; then the mean over query patches and images, for each layer and head. Attention to prefix tokens
    (class, distillation, registers) is ignored and the rest renormalised; the file also has the other convention, in which it
    counts as distance 0.

    Rollout: the mean over heads, ½A + ½I, rows normalised, multiplied from the output through all layers.

    Without a checkpoint the included model vitrail-ti8-tiny-imagenet is inspected.

    Example: vitrail inspect cat.jpg --out inside

    Example: vitrail inspect runs/pets cat.jpg dog.jpg --out pets-inspect

    Example: vitrail inspect B_16.npz --preprocess google-vit --data folder:imagenet --out b16

    Example: vitrail inspect runs/scratch --compare runs/finetuned --data folder:pets --out before-after

    Example: vitrail inspect runs/masked-patch-tiny-imagenet --what reconstruction --out reconstructed

    Args:
        words: First, if given, the checkpoint: a run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16,
            hf:owner/name or an included model. Then image files, folders (searched recursively), or .txt files with one path per
            line.
        out: The output folder; its index.html shows everything.
        what: The figures above; or, for a run with masked pre-training, reconstructions: original, corrupted and predicted images
            side by side. Without images, the run's own data is used.
        data: Use images of a source such as folder:DIR, csv:FILE or torchvision:CIFAR10 instead of files.
        split: Which split of the source; default: val, or test if there is no val.
        count: How many random images of the source, or of folders and lists, to average over.
        show: How many images to draw maps of.
        seed: Seed of the random images.
        compare_with: More checkpoints to compare with the first, for example before and after fine-tuning.
        layers: Only these layers for distance and heads, counted from 0; negative numbers count from the end.
        patch: Row and column of the query patch for the heads figure, counted from 0; default: the centre.
        image_size: Input size: one number, or height and width. Position embeddings are resampled.
        preprocess: A preset (google-vit, big-vision, timm, imagenet, deit, cifar) that replaces the checkpoint's own
            preprocessing. With +exif (timm+exif, or stored+exif for the checkpoint's own) photos are turned upright.
        batch: Images per batch; default: as many as need about 1 GiB for attention. Does not change results.
        device: Device: auto, cpu, cuda or mps.
        overwrite: Replace an existing inspection.
        json_: Print a summary as JSON.
    """
    from vitrail.checkpoints import load
    from vitrail.inspect.images import preprocess_images
    from vitrail.inspect.reconstruction import own_source
    from vitrail.inspect.report import InspectOptions, check_output_folder, write_report
    from vitrail.train.parallel import choose_device

    console = Console(stderr=json_)
    check_output_folder(out, overwrite)
    check_place(out)
    if show < 1:
        raise VitrailError(f"--show is {show}; use 1 or more.")
    given, images = split_checkpoint(words)
    checkpoint = given or DEFAULT
    size, references = _size(image_size), (checkpoint, *compare_with)
    if what == "reconstruction":
        _check_runs(references)
        data, count = (data if data or images else own_source(checkpoint)), min(count, show)
        _check_reconstruction(data, images, size)
    names = short_names(references)
    with console.status("loading") as status:
        bundles = [load(ref, preprocess=preprocess, device=choose_device(device), image_size=size) for ref in references]
        raw, loaded = _load_images(bundles[0], images, data, split, count, seed), []
        for bundle, reference, name in zip(bundles, references, names, strict=True):
            folder = "." if len(references) == 1 else re.sub(r"[^A-Za-z0-9._+-]+", "-", name)
            inputs = preprocess_images(bundle, raw, show) if raw is not None else None
            loaded.append(Loaded(reference, name, folder, bundle, inputs))
        if what == "figures":
            sections = _figures(loaded, InspectOptions(layers=layers or None, patch=patch, batch=batch), status.update)
        else:
            sections = _reconstructions(loaded, seed)
        if given is None:
            console.print(default_note(loaded[0].bundle), highlight=False, soft_wrap=True)
        for section, one in zip(sections[-len(loaded) :], loaded, strict=True):  # a comparison comes first
            section.notes += [f"assumed: {text}" for text in one.bundle.report.assumptions]
            section.notes += raw.trained_on(one.bundle) if raw is not None else []
        about = {"checkpoints": list(references), "titles": names, "data": data, "version": version("vitrail")}
        write_report(out, sections, {**about, "images": raw.names if raw else []})
    _print_summary(console, sections, out, json_)


class Loaded(NamedTuple):
    """A checkpoint to inspect, and the images as it takes them."""

    reference: str
    name: str
    folder: str
    bundle: Bundle
    inputs: PreprocessedImages | None


def _figures(loaded: Sequence[Loaded], options: InspectOptions, show_status: Callable[[str], None]) -> list[Section]:
    from vitrail.inspect.report import compare, inspect_model

    sections = []
    for one in loaded:
        progress = lambda text, name=one.name: show_status(f"{name}: {text}")  # noqa: E731
        sections.append(inspect_model(one.name, one.folder, one.bundle, one.inputs, options, progress))
    show_status("drawing")
    comparison = compare(sections, [one.bundle for one in loaded], [one.inputs for one in loaded])
    return [comparison, *sections] if comparison is not None else sections


def _reconstructions(loaded: Sequence[Loaded], seed: int) -> list[Section]:
    from vitrail.inspect.reconstruction import inspect_reconstruction

    sections = []
    for one in loaded:
        assert one.inputs is not None  # checked before
        sections.append(inspect_reconstruction(one.name, one.folder, one.reference, one.bundle, one.inputs, seed))
    return sections


def _load_images(
    bundle: Bundle, images: tuple[str, ...], data: str | None, split: str | None, count: int, seed: int
) -> RawImages | None:
    from vitrail.inspect.images import from_files, from_source

    if images and data is not None:
        raise VitrailError("Image files and --data were both given; choose one.")
    if data is not None:
        _check_count(count)
        return from_source(bundle, data, split, count, seed)
    return from_files(_files(images, count, seed)) if images else None


def _files(images: tuple[str, ...], count: int, seed: int) -> list[Path]:
    """List the files: all of those that are named, but at most `count` random ones where folders or lists are given."""
    import numpy as np

    from vitrail.evaluate.predictor import find_images

    found = find_images(images)
    files = [Path(found.image_name(index)) for index in range(len(found))]
    if len(files) == len(images):
        return files
    _check_count(count)
    chosen = np.random.default_rng(seed).permutation(len(files))[:count]
    return [files[index] for index in sorted(chosen.tolist())]


def _check_count(count: int) -> None:
    if count < 1:
        raise VitrailError(f"--count is {count}; use 1 or more.")


def _check_runs(references: tuple[str, ...]) -> None:
    missing = next((one for one in references if not Path(one).is_dir()), None)
    if missing is not None:
        raise VitrailError(
            f"There is no folder {missing}. Reconstructions need a run with --task.kind masked-patch or masked-autoencoder."
        )


def _check_reconstruction(data: str | None, images: tuple[str, ...], size: int | tuple[int, int] | None) -> None:
    if data is None and not images:
        raise VitrailError("Reconstructions need images: pass image files, or --data such as folder:DIR.")
    if size is not None:
        raise VitrailError("--image-size does not work with reconstructions: the prediction head has a fixed input size.")


def _size(numbers: tuple[int, ...]) -> int | tuple[int, int] | None:
    if len(numbers) > 2:
        raise VitrailError(f"--image-size takes one number, or height and width; got {len(numbers)} numbers.")
    return None if not numbers else numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def short_names(references: Sequence[str]) -> list[str]:
    """Shorten references to the shortest ends that differ: `runs/a/model` and `runs/b/model` become a and b."""
    parts = [[part for part in Path(reference).parts if part not in ("/", "model")] or [reference] for reference in references]
    if len({tuple(one) for one in parts}) < len(parts):
        raise VitrailError(f"The same checkpoint was given twice: {', '.join(references)}. Pass different checkpoints to compare.")
    length = 1
    while len({tuple(one[-length:]) for one in parts}) < len(parts):
        length += 1
    return ["/".join(one[-length:]) for one in parts]


def _print_summary(console: Console, sections: Sequence[Section], out: Path, as_json: bool) -> None:
    from vitrail.inspect.report import INDEX

    if as_json:
        summary = {one.folder: {"figures": [panel.name for panel in one.panels], "notes": one.notes} for one in sections}
        say(to_json({"index": str(out / INDEX), "sections": summary}, indent=2))
        return
    for section in sections:
        names = ", ".join(panel.heading.lower() for panel in section.panels)
        console.print(Text.assemble((section.title, "bold"), f": {names}"), highlight=False, soft_wrap=True)
        for note in section.notes:
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
    console.print(f"figures: {out / INDEX}", highlight=False, soft_wrap=True)
