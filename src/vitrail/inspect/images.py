"""Load images for inspection: preprocessed for the model, and denormalised for drawing."""

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
    """Encoded images, so that every checkpoint can apply its own preprocessing."""

    names: list[str]
    payloads: list[Payload]


@dataclass(frozen=True)
class PreprocessedImages:
    """Images after one checkpoint's preprocessing."""

    names: list[str]
    images: Tensor
    pictures: list[Array]
    """The first images, denormalised: [height, width, 3] from 0 to 1, cropped and resized as the model sees them."""


def from_files(paths: Sequence[Path]) -> RawImages:
    return RawImages([path.name for path in paths], [read_file(path) for path in paths])


def from_source(reference: str, split: str | None, count: int, seed: int) -> RawImages:
    """Draw `count` random images of a data source."""
    source = open_source(reference)
    if split is None:
        split = next((name for name in ("val", "test") if name in source.splits), next(iter(source.splits)))
    chosen = source.split(split)
    if not len(chosen):
        raise VitrailError(f"The split {split!r} of {reference} has no images.")
    indices = np.random.default_rng(seed).permutation(len(chosen))[:count].tolist()
    return RawImages([chosen.image_name(index) for index in indices], [chosen.payload(index) for index in indices])


def preprocess_images(bundle: Bundle, raw: RawImages, shown: int) -> PreprocessedImages:
    """Apply the checkpoint's preprocessing; the first `shown` images are also kept as pictures."""
    preprocess = bundle.stored_preprocess()
    pairs = zip(raw.payloads, raw.names, strict=True)
    try:
        images = torch.stack([preprocess(payload, name=name) for payload, name in pairs])
    except BadImage as bad:
        raise VitrailError(f"{bad.name}: {bad.reason}. Replace it, or use other images.") from bad
    return PreprocessedImages(raw.names, images, [denormalise(image, preprocess) for image in images[:shown]])


def denormalise(image: Tensor, preprocess: Preprocess) -> Array:
    """Turn a normalised image [channel, height, width] into RGB from 0 to 1. Other than three channels become grey."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    colours = (image * std + mean).clamp(0, 1)
    if len(colours) != 3:
        colours = colours.mean(dim=0, keepdim=True).expand(3, -1, -1)
    return np.asarray(colours.permute(1, 2, 0).numpy(), dtype=np.float64)
