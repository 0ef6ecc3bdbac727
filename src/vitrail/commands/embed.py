"""`vitrail embed`: features of images, as a file."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from vitrail.commands.options import Checkpoint, Features, Images, Json, Options, RunOptions, progress_bar
from vitrail.evaluate.embeddings import check_ending
from vitrail.evaluate.embeddings import embed as embed_images
from vitrail.evaluate.features import FeatureSpec
from vitrail.evaluate.predicting import find_images
from vitrail.train.parallel import World, choose_device


def embed(
    checkpoint: Checkpoint,
    images: Images,
    /,
    *,
    out: Path,
    features: Features = FeatureSpec(),  # noqa: B008 - it is frozen
    json_: Json = False,
    options: Options = RunOptions(bad_images="skip"),  # noqa: B008
) -> int:
    """Compute features of images and write them to a file with the images' names.

    The file says which features they are and how images were preprocessed. An image that cannot be read is reported and
    left out; the exit status is then 1.

    Example: vitrail embed runs/pets photos/ --out photos.npz

    Example: vitrail embed B_16.npz photos/ --out photos.parquet --what mean --layer 8 --no-norm

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, or hf:owner/name. It needs no head.
        images: Image files, folders (searched to the bottom), or .txt files with a path a line.
        out: A file that ends in .npz or .parquet.
        features: Which features.
        json_: Print what was done as JSON for a program.
        options: How images are read and computed.
    """
    console = Console(stderr=True)
    check_ending(out)
    world = World(choose_device(options.device))
    split = find_images(images)
    bundle = options.bundle(checkpoint, world)
    with progress_bar(console, "embedding", len(split)) as advance:
        running = options.running(world, advance)
        found = embed_images(bundle, split, features, running)
    found.save(out)
    if (remark := running.remark(bundle.model)) is not None:
        console.print(remark, highlight=False, soft_wrap=True)
    for one in found.bad:
        console.print(f"{one.name}: {one.fault}", style="red", highlight=False, markup=False, soft_wrap=True)
    summary = {
        "out": str(out),
        "images": len(found.names),
        "shape": list(found.features.shape),
        "bad_images": len(found.bad),
        **found.about,
    }
    if json_:
        print(json.dumps(summary, indent=2))  # noqa: T201
    else:
        shape = " × ".join(map(str, found.features.shape))
        print(f"{out}: {shape} numbers, {features.describe()}")  # noqa: T201
    return 1 if found.bad else 0
