"""`vitrail embed`: compute features of images and write them to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from vitrail.commands.options import Checkpoint, Features, Images, Json, Options, RunOptions, progress_bar
from vitrail.commands.output import check_output_file
from vitrail.commands.shards import (
    ShardSettings,
    check_shard_folder,
    embed_to_folder,
    is_folder,
    refuse_ranks,
    refuse_shard_options,
)
from vitrail.commands.terminal import Console, say
from vitrail.evaluate.settings import FeatureFormat, FeatureSpec
from vitrail.text import printable, to_json


def embed(
    checkpoint: Checkpoint,
    images: Images,
    /,
    *,
    out: Path,
    overwrite: bool = False,
    features: Features = FeatureSpec(),  # noqa: B008 - it is frozen
    format_: Annotated[FeatureFormat, tyro.conf.arg(name="format")] = "safetensors",
    shard_size: int = 10_000,
    json_: Json = False,
    options: Options = RunOptions(bad_images="skip"),  # noqa: B008
) -> int:
    """Compute features of images and write them, with the image names, to a file or to a folder of shards.

    The output also records which features they are and how images were preprocessed. An image that cannot be read is reported
    and skipped; the exit status is then 1.

    A folder is for millions of images: memory does not grow, torchrun may run the command on many GPUs and machines, and running
    it again after it was interrupted, on any number of them, computes only the shards that are missing.

    Example: vitrail embed runs/pets photos/ --out photos.npz

    Example: vitrail embed B_16.npz photos/ --out photos.parquet --feature mean --layer 8 --no-norm

    Example: torchrun --nproc-per-node 8 -m vitrail embed ViT-B/16 'wds:photos/*.tar' --out features

    Args:
        checkpoint: A run or checkpoint folder, an .npz, .pth or .safetensors file, ViT-B/16 or hf:owner/name. It needs no head.
        images: Image files, folders (searched recursively), .txt files with one path per line, or data sources such as csv:FILE,
            wds:PATTERN (also of URLs), packed:DIR or hf:NAME.
        out: The output file, .npz or .parquet, or a folder for shards.
        overwrite: Replace an existing file.
        features: Which features.
        format_: File format of the shards.
        shard_size: Images per shard.
        json_: Print a summary as JSON.
        options: How images are loaded and computed.
    """
    from vitrail.evaluate.embeddings import check_extension
    from vitrail.evaluate.embeddings import embed as embed_images
    from vitrail.evaluate.predictor import find_images
    from vitrail.train.parallel import World, choose_device

    if is_folder(out):
        check_shard_folder(out, overwrite=overwrite)
        settings = ShardSettings(checkpoint=checkpoint, images=images, out=out, size=shard_size, options=options, json=json_)
        return embed_to_folder(settings, features, format_)
    refuse_shard_options(format_, shard_size, ("safetensors", 10_000))
    refuse_ranks(out)
    console = Console(stderr=True)
    check_extension(out)
    check_output_file(out, overwrite=overwrite)
    world = World(choose_device(options.device))
    bundle = options.bundle(checkpoint, world)
    split = find_images(images)
    with progress_bar(console, "embedding", len(split)) as advance:
        context = options.eval_context(world, advance)
        embeddings = embed_images(bundle, split, features, context)
    embeddings.save(out)
    if (note := context.precision_note(bundle.model)) is not None:
        console.print(note, highlight=False, soft_wrap=True)
    for one in embeddings.bad:
        console.print(printable(f"{one.name}: {one.reason}", one_line=True), style="red", highlight=False, soft_wrap=True)
    summary = {
        "out": str(out),
        "images": len(embeddings.names),
        "shape": list(embeddings.features.shape),
        "bad_images": len(embeddings.bad),
        "assumptions": bundle.report.assumptions,
        **embeddings.about,
    }
    if json_:
        say(to_json(summary, indent=2))
    else:
        shape = " × ".join(map(str, embeddings.features.shape))
        say(f"{out}: {shape} features, {features.describe()}")
    return 1 if embeddings.bad else 0
