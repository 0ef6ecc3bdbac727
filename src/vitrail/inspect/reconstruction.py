"""What a model that learns without labels makes of hidden patches: the image, what was hidden of it, what it predicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.errors import VitrailError
from vitrail.inspect.images import PreprocessedImages
from vitrail.inspect.inputs import Array
from vitrail.inspect.page import NOT_IN_PAPER
from vitrail.inspect.report import Panel, Section
from vitrail.inspect.style import WIDTH, bare, fitted, styled, tight
from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.features import evaluating
from vitrail.models.masked import MaskedPatches, Pretraining, at
from vitrail.tasks.masked import Masked, MaskedMeter, Outcome
from vitrail.tasks.patch_targets import Colours, PatchTarget
from vitrail.train.pretext import load_parts

_GREY = 0.5


@dataclass(frozen=True)
class Reconstruction:
    """Pictures [image, row, column, channel] from 0 to 1 by what they show, in the order in which they are drawn."""

    pictures: Mapping[str, Array]
    places: Array
    """[image, place]: the hidden patches, counted along the rows of the grid."""
    losses: Array
    metrics: Mapping[str, float]
    """Over all images, as training reports them."""


@torch.no_grad()
def reconstruct(wrapper: Pretraining, task: Masked, images: Tensor, *, seed: int = 0) -> Reconstruction:
    """Hide patches of normalised images as in training, drawn by `seed`, and show what is predicted for them."""
    target, device = task.target, wrapper.encoder.norm.weight.device
    images = images.to(device)
    task.to(device)
    noise = torch.rand(len(images), wrapper.patches, wrapper.draws, generator=torch.Generator().manual_seed(seed)).to(device)
    with evaluating(wrapper):
        predicted, places = wrapper(images, noise)
    wanted, true = at(target.of(images), places), target.patches(images)
    there = at(true, places)
    shown = {"original": true, **_hidden(wrapper, true, noise, places)}
    shown[_predicted(wrapper)] = _put(true, places, target.painted(predicted, there))
    if isinstance(target, Colours):
        shown["true colours"] = _put(true, places, target.colours(wanted))
    meter = MaskedMeter(target)
    meter.update(Outcome(predicted.float(), wanted, at(target.bins(images), places)))
    pictures = {name: _pictures(patches, target) for name, patches in shown.items()}
    return Reconstruction(pictures, places.cpu().numpy(), target.loss(predicted, wanted).cpu().numpy(), meter.metrics())


def _predicted(wrapper: Pretraining) -> str:
    return "reconstructed" if isinstance(wrapper, MaskedAutoencoder) else "predicted"


def _hidden(wrapper: Pretraining, patches: Tensor, noise: Tensor, places: Tensor) -> dict[str, Tensor]:
    """The image as far as the model sees it: a [mask] is grey, a replaced patch shows the one in its place."""
    grey = torch.full_like(at(patches, places), _GREY)
    if not isinstance(wrapper, MaskedPatches):
        return {"visible": _put(patches, places, grey)}
    swapped = places[:, wrapper.masked : wrapper.masked + wrapper.replaced]
    others = patches.flatten(0, 1)[wrapper.donors(swapped, noise[..., 1])]
    kept = at(patches, places[:, wrapper.masked + wrapper.replaced :])
    return {"corrupted": _put(patches, places, torch.cat([grey[:, : wrapper.masked], others, kept], dim=1))}


def _put(patches: Tensor, places: Tensor, values: Tensor) -> Tensor:
    return patches.scatter(1, places[..., None].expand(-1, -1, patches.shape[2]), values.to(patches.dtype))


def _pictures(patches: Tensor, target: PatchTarget) -> Array:
    (rows, columns), (height, width) = target.grid, target.stride
    images = patches.reshape(len(patches), rows, columns, target.channels, height, width).permute(0, 1, 4, 2, 5, 3)
    colours = images.reshape(len(patches), rows * height, columns * width, target.channels).cpu()
    if target.channels != 3:
        colours = colours.mean(dim=3, keepdim=True).expand(-1, -1, -1, 3)
    return colours.clamp(0, 1).double().numpy()


def run_folder(reference: str) -> Path:
    """The folder of a run, named itself or by the model in it."""
    path = Path(reference).expanduser()
    return path.parent if path.name == "model" and (path.parent / "config.json").is_file() else path


def own_source(reference: str) -> str | None:
    """Where a run's own images came from."""
    try:
        recipe: dict[str, Any] = json.loads((run_folder(reference) / "config.json").read_text(encoding="utf-8"))["recipe"]
        return str(recipe["data"]["source"]) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def examine_reconstruction(title: str, folder: str, reference: str, bundle: Bundle, seen: PreprocessedImages, seed: int) -> Section:
    """The section of one run."""
    if bundle.preprocess is None:
        raise VitrailError(f"No preprocessing is recorded in {reference}, so its pixels cannot be told. Is it a run's folder?")
    wrapper, task = load_parts(run_folder(reference), bundle.model, bundle.preprocess)
    images = seen.images[: len(seen.pictures)]
    found = reconstruct(wrapper, task, images, seed=seed)
    mae = isinstance(wrapper, MaskedAutoencoder)
    caption = (
        f"{wrapper.num_masked} of {wrapper.patches} patches are masked in each image"
        + (
            " (grey)"
            if mae
            else f" ({wrapper.masked} masked, grey; {wrapper.replaced} replaced by patches of other images; rest kept)"
        )
        + f". {_captions(task)} The loss on these images is {found.metrics['loss']:.4g}, "
        f"{found.metrics['relative_loss']:.1%} of that of the best constant prediction ({found.metrics['constant_loss']:.4g})."
    )
    names = seen.names[: len(images)]
    rows = [("image", "loss"), *zip(names, found.losses.tolist(), strict=True)]
    facts = {"checkpoint": reference, "model": bundle.model.config.name, "task": task.kind}
    arrays = {name.replace(" ", "_"): values for name, values in found.pictures.items()} | {"places": found.places}
    badge = NOT_IN_PAPER if mae else "App. B.1.2"
    shown = Panel("reconstruction", "Reconstruction", caption, draw_reconstruction(found.pictures), arrays, rows, badge)
    return Section(title, folder, facts, [shown])


def _how(wrapper: Pretraining) -> str:
    if not isinstance(wrapper, MaskedPatches):
        return " (grey)"
    kept = wrapper.num_masked - wrapper.masked - wrapper.replaced
    return f" ({wrapper.masked} masked, grey; {wrapper.replaced} replaced by other patches of these images; {kept} kept)"


def _captions(task: Masked) -> str:
    if task.kind == "masked-autoencoder":
        return "Pixels are predicted relative to each patch's own mean and deviation, which the drawing takes from the truth."
    if isinstance(task.target, Colours):
        what = "its mean colour" if task.target.cells == 1 else "its colours on a 4×4 grid"
        return f"Of each hidden patch {what} is predicted, in 3 bits a channel; shown is the most likely class."
    return "Of each hidden patch all pixels are predicted."


@styled
def draw_reconstruction(pictures: Mapping[str, Array]) -> Figure:
    """Two images a row (one, if there is only one), each with all its pictures side by side."""
    count, (height, width) = len(next(iter(pictures.values()))), next(iter(pictures.values())).shape[1:3]
    abreast, kinds = min(2, count), [*pictures]
    columns, rows = [*kinds, None] * abreast, -(-count // abreast)  # None: a gap after each image
    gaps = [0.08 if kind is None else 1.0 for kind in columns[:-1]]
    wide, tall = fitted(height, width, (min(WIDTH / sum(gaps), 1.6), 2.4))
    figure = Figure(figsize=(wide * sum(gaps), rows * tall + 0.3), layout="constrained")
    tight(figure, 0.015)
    axes = figure.subplots(rows, len(gaps), squeeze=False, width_ratios=gaps)
    for (row, column), one in np.ndenumerate(axes):
        bare(one)
        kind, image = columns[column], row * abreast + column // (len(kinds) + 1)
        if kind is None or image >= count:
            one.set_visible(False)
            continue
        one.imshow(pictures[kind][image], interpolation="nearest")
        if row == 0:
            one.set_title(kind, fontsize=7)
    return figure
