"""Images as a checkpoint sees them: preprocessed for the model, and turned back into pictures to draw on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data import open_source
from vitrail.data.preprocess import Preprocess, read_file
from vitrail.data.types import BadImage, Payload
from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array


@dataclass(frozen=True)
class RawImages:
    """Images as they lie on the disk, so that every checkpoint can preprocess them its own way."""

    names: list[str]
    payloads: list[Payload]


@dataclass(frozen=True)
class PreprocessedImages:
    """The same images through one checkpoint's preprocessing."""

    names: list[str]
    images: Tensor
    pictures: list[Array]
    """Of the first images, [height, width, 3] from 0 to 1: just what the model saw, cut and resized."""


def from_files(paths: Sequence[Path]) -> RawImages:
    return RawImages([path.name for path in paths], [read_file(path) for path in paths])


def from_source(reference: str, split: str | None, count: int, seed: int) -> RawImages:
    """Images of a data source drawn at random, the same for the same seed, in the source's order."""
    source = open_source(reference)
    if split is None:
        split = next((name for name in ("val", "test") if name in source.splits), next(iter(source.splits)))
    chosen = source.split(split)
    if not len(chosen):
        raise VitrailError(f"The split {split!r} of {reference} has no images, so there is nothing to look at.")
    order = np.random.default_rng(seed).permutation(len(chosen))[:count]
    picked = [int(index) for index in order]
    return RawImages([chosen.image_name(index) for index in picked], [chosen.payload(index) for index in picked])


def views(bundle: Bundle, originals: RawImages, shown: int) -> PreprocessedImages:
    """The images as this checkpoint takes them, the first `shown` of them also as pictures."""
    preprocess = bundle.preprocess
    if preprocess is None:
        raise VitrailError(
            f"No preprocessing is recorded in {bundle.report.source}, so its images cannot be prepared as in its training. "
            "Pass --preprocess google-vit (Google's ViTs: [−1, 1], square resize), or another preset."
        )
    pairs = zip(originals.payloads, originals.names, strict=True)
    try:
        images = torch.stack([preprocess(payload, name=name) for payload, name in pairs])
    except BadImage as bad:
        raise VitrailError(f"{bad.name}: {bad.reason}. Replace it, or look at other images.") from bad
    return PreprocessedImages(originals.names, images, [picture(image, preprocess) for image in images[:shown]])


def picture(image: Tensor, preprocess: Preprocess) -> Array:
    """A normalised image [channel, height, width] as colours from 0 to 1; other than three channels as their mean in grey."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    colours = (image * std + mean).clamp(0, 1)
    if len(colours) != 3:
        colours = colours.mean(dim=0, keepdim=True).expand(3, -1, -1)
    return np.asarray(colours.permute(1, 2, 0).numpy(), dtype=np.float64)
