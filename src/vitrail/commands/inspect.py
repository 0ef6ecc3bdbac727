"""`vitrail inspect`: draw the paper's figures for any checkpoint, in a folder with an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.text import Text

from vitrail.checkpoints.pretrained import DEFAULT
from vitrail.commands.default_model import default_note, split_checkpoint
from vitrail.commands.options import Json, parse_size
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle
    from vitrail.inspect.images import RawImages
    from vitrail.inspect.inspection import Inspection


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
    image_size: str | None = None,
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
        image_size: Input size in pixels: 384, or height and width as 384x512. Position embeddings are resampled.
        preprocess: A preset (google-vit, big-vision, timm, imagenet, deit, cifar) that replaces the checkpoint's own
            preprocessing. With +exif (timm+exif, or stored+exif for the checkpoint's own) photos are turned upright.
        batch: Images per batch; default: as many as need about 1 GiB for attention. Does not change results.
        device: Device: auto, cpu, cuda or mps.
        overwrite: Replace an existing inspection.
        json_: Print a summary as JSON.
    """
    from vitrail.checkpoints import load
    from vitrail.inspect.images import preprocess_images
    from vitrail.inspect.inspection import Inspected, check_amounts, check_reconstruction, inspect_checkpoints, short_names
    from vitrail.inspect.reconstruction import own_source
    from vitrail.inspect.report import InspectOptions, check_output_folder
    from vitrail.train.parallel import choose_device

    console = Console(stderr=json_)
    check_output_folder(out, overwrite)
    check_place(out)
    check_amounts(count=count, show=show)
    given, images = split_checkpoint(words)
    checkpoint = given or DEFAULT
    size, references = None if image_size is None else parse_size(image_size), (checkpoint, *compare_with)
    short_names(references)
    if what == "reconstruction":
        data, count = (data if data or images else own_source(checkpoint)), min(count, show)
        check_reconstruction(references, has_images=bool(data or images), resized=size is not None)
    with console.status("loading") as status:
        bundles = [load(ref, preprocess=preprocess, device=choose_device(device), image_size=size) for ref in references]
        raw = _load_images(bundles[0], images, data, split, count, seed)
        if given is None:
            console.print(default_note(bundles[0]), highlight=False, soft_wrap=True)
        inputs = [preprocess_images(bundle, raw, show) if raw is not None else None for bundle in bundles]
        inspection = inspect_checkpoints(
            [Inspected(*one) for one in zip(references, bundles, inputs, strict=True)],
            raw,
            what=what,
            options=InspectOptions(layers=layers or None, patch=patch, batch=batch),
            seed=seed,
            data=data,
            progress=status.update,
        )
        inspection.save(out, overwrite=overwrite)
    _print_summary(console, inspection, out, json_)


def _load_images(
    bundle: Bundle, images: tuple[str, ...], data: str | None, split: str | None, count: int, seed: int
) -> RawImages | None:
    from vitrail.evaluate.predictor import find_images
    from vitrail.inspect.images import from_source, from_split

    if images and data is not None:
        raise VitrailError("Image files and --data were both given; choose one.")
    if data is not None:
        return from_source(bundle, data, split, count, seed)
    if not images:
        return None
    found = find_images(images)
    return from_split(found, None if len(found) == len(images) else count, seed)  # files that are named are all used


def _print_summary(console: Console, inspection: Inspection, out: Path, as_json: bool) -> None:
    from vitrail.inspect.report import INDEX

    if as_json:
        say(to_json({"index": str(out / INDEX), "sections": inspection.summary()}, indent=2))
        return
    for section in inspection.sections:
        names = ", ".join(panel.heading.lower() for panel in section.panels)
        console.print(Text.assemble((section.title, "bold"), f": {names}"), highlight=False, soft_wrap=True)
        for note in section.notes:
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
    console.print(f"figures: {out / INDEX}", highlight=False, soft_wrap=True)
