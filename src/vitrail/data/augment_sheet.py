"""Sheet of augmented images: one row per image, as the model sees it in several epochs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from vitrail.data.augment.spec import Augment
from vitrail.data.contact_sheet import BACKGROUND, MUTED, TEXT, font, mention_missing, shorten
from vitrail.data.loader import EvalLoader, TrainLoader
from vitrail.data.preprocess import Preprocess
from vitrail.data.settings import BadImages
from vitrail.data.thumbnails import fit_square
from vitrail.data.types import Array, Split
from vitrail.errors import VitrailError
from vitrail.files import atomic_file

_CELL, _GAP, _MARGIN, _HEADER = 112, 4, 130, 76


def augment_sheet(
    split: Split,
    preprocess: Preprocess,
    augment: Augment,
    path: Path,
    *,
    rows: int = 8,
    columns: int = 8,
    seed: int = 0,
    bad_images: BadImages = "error",
) -> None:
    """Write a PNG with images of different classes: preprocessed as in evaluation, then as in `columns` epochs of training.

    With mixing, an image is mixed with that of the row above. With `bad_images="skip"` a bad image has no row.
    """
    if rows < 1 or columns < 1:
        raise VitrailError(f"A sheet needs at least one row and one column, not {rows} and {columns}.")
    part = split.subset(_spread(split, rows, seed))
    plain = next(iter(EvalLoader(part, preprocess=preprocess, batch=len(part), workers=0, bad_images=bad_images)), None)
    if plain is None:
        raise VitrailError(
            f"None of the images drawn for the sheet ({len(part)}) can be read. Run `vitrail data check` to list all bad images."
        )
    part = part.subset(plain.indices.numpy())
    once = dataclasses.replace(augment, repeats=1)
    loader = TrainLoader(part, preprocess=preprocess, augment=once, batch=len(part), seed=seed, sampling="in-order", workers=0)
    loader.set_total_steps(2**40)  # mixing has not ended yet
    batches = [plain.images] + [batch.images for batch, _ in zip(loader, range(columns), strict=False)]

    width = _MARGIN + len(batches) * (_CELL + _GAP) + 16
    sheet = Image.new("RGB", (width, _HEADER + len(part) * (_CELL + _GAP) + 8), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    line = width // 8
    draw.multiline_text((12, 8), shorten(_describe(augment), 2 * line, wrap=line), TEXT, font(14))
    for column, images in enumerate(batches):
        left = _MARGIN + column * (_CELL + _GAP) + (12 if column else 0)
        draw.text((left, 52), f"epoch {column - 1}" if column else "evaluation", MUTED, font(14))
        for row, pixels in enumerate(_pixels(images, preprocess)):
            top = _HEADER + row * (_CELL + _GAP)
            if column == 0 and part.task == "classify":
                draw.multiline_text((12, top + 8), shorten(part.classes[part.targets[row]], 60, wrap=15), TEXT, font(14))
            sheet.paste(fit_square(pixels, _CELL), (left, top))
    mention_missing(part.classes[k] for k in np.unique(part.targets) if part.task == "classify")
    with atomic_file(path) as temporary:
        sheet.save(temporary, "PNG")


def _spread(split: Split, count: int, seed: int) -> Array:
    """Choose images at random, of as many classes as possible."""
    order = np.random.default_rng(seed).permutation(len(split))
    if split.task != "classify":
        return order[:count]
    targets = split.targets[order]
    grouped = np.argsort(targets, kind="stable")
    starts = np.searchsorted(targets[grouped], targets[grouped])
    rank = np.empty(len(order), np.int64)  # the first image of every class comes before the second of any
    rank[grouped] = np.arange(len(order)) - starts
    return order[np.argsort(rank, kind="stable")][:count]


def _pixels(images: torch.Tensor, preprocess: Preprocess) -> Array:
    """Undo the normalisation: uint8 [n, height, width, channels]."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    return (images * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def _describe(augment: Augment) -> str:
    default = Augment().to_dict()
    changed = {key: value for key, value in augment.to_dict().items() if value != default[key]}
    return ", ".join(f"{key} {value}" for key, value in changed.items()) or "crop and flip"
