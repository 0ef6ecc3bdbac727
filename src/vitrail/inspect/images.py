"""Load images for inspection: preprocessed for the model, and denormalised for drawing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.data.trained_on import evaluation_split, open_for, overlap
from vitrail.data.types import BadImage, Payload, Source, Split
from vitrail.errors import VitrailError
from vitrail.inspect.inputs import Array
from vitrail.text import printable

log = logging.getLogger("vitrail.data")


@dataclass(frozen=True)
class RawImages:
    """Encoded images, so that every checkpoint can apply its own preprocessing."""

    names: list[str]
    payloads: list[Payload]
    source: Source | None = None
    split: Split | None = None
    """Where they come from, if not from files."""

    def trained_on(self, bundle: Bundle) -> list[str]:
        """Return warnings of images that a checkpoint was trained on."""
        if self.source is None or self.split is None:
            return []
        found = overlap(bundle.trained_on, self.source, self.split)
        return list(found.notes) if found is not None else []


@dataclass(frozen=True)
class PreprocessedImages:
    """Images after one checkpoint's preprocessing."""

    names: list[str]
    images: Tensor
    pictures: list[Array]
    """The first images, denormalised: [height, width, 3] from 0 to 1, cropped and resized as the model sees them."""


def from_split(split: Split, count: int | None, seed: int) -> RawImages:
    """Take all images of a split, or at most `count` random ones."""
    if count is not None:
        split = split.subset(sorted(np.random.default_rng(seed).permutation(len(split))[:count].tolist()))
    names = [printable(Path(split.image_name(k)).name, one_line=True) for k in range(len(split))]
    return RawImages(names, _payloads(split))


def from_source(bundle: Bundle, reference: str, split: str | None, count: int, seed: int) -> RawImages:
    """Draw `count` random images of a data source, which is divided as in training if the checkpoint was trained on it."""
    source = open_for(bundle.trained_on, reference)
    chosen = evaluation_split(bundle.trained_on, source, split)
    if not len(chosen):
        raise VitrailError(f"The split {chosen.name!r} of {reference} has no images. Choose another one.")
    indices = np.random.default_rng(seed).permutation(len(chosen))[:count].tolist()
    drawn = chosen.subset(indices)
    names = [printable(drawn.image_name(k), one_line=True) for k in range(len(drawn))]  # for figures
    return RawImages(names, _payloads(drawn), source, drawn)


def _payloads(split: Split) -> list[Payload]:
    try:
        return [split.payload(k) for k in range(len(split))]
    except BadImage as bad:
        raise _unusable(bad) from bad


def preprocess_images(bundle: Bundle, raw: RawImages, shown: int) -> PreprocessedImages:
    """Apply the checkpoint's preprocessing; the first `shown` images are also kept as pictures."""
    preprocess = bundle.stored_preprocess()
    rotated = next((name for name, one in zip(raw.names, raw.payloads, strict=True) if preprocess.leaves_rotated(one)), None)
    if rotated is not None:
        log.warning("%s", preprocess.rotated_note(rotated))
    pairs = zip(raw.payloads, raw.names, strict=True)
    try:
        images = torch.stack([preprocess(payload, name=name) for payload, name in pairs])
    except BadImage as bad:
        raise _unusable(bad) from bad
    return PreprocessedImages(raw.names, images, [denormalise(image, preprocess) for image in images[:shown]])


def _unusable(bad: BadImage) -> VitrailError:
    return VitrailError(f"{bad.name}: {bad.reason}. Replace it, or use other images.")


def denormalise(image: Tensor, preprocess: Preprocess) -> Array:
    """Turn a normalised image [channel, height, width] into RGB from 0 to 1. Other than three channels become grey."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    colours = (image * std + mean).clamp(0, 1)
    if len(colours) != 3:
        colours = colours.mean(dim=0, keepdim=True).expand(3, -1, -1)
    return np.asarray(colours.permute(1, 2, 0).numpy(), dtype=np.float64)
