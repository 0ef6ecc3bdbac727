"""Draw the reconstructions of masked pre-training: the image, the model's input, and the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.drawing.figure import Figure
from vitrail.drawing.style import WIDTH, bare, fitted, styled, tight
from vitrail.inspect.images import PreprocessedImages
from vitrail.inspect.inputs import Array
from vitrail.inspect.page import NOT_IN_PAPER
from vitrail.inspect.report import Panel, Section
from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.features import evaluating
from vitrail.models.masked import MaskedPatches, Pretraining, at
from vitrail.regular_files import read_json_object
from vitrail.tasks.masked import Masked, MaskedMeter, MaskedPrediction
from vitrail.tasks.patch_targets import Colours, PatchTarget
from vitrail.train.pretext import load_parts

_GREY = 0.5


@dataclass(frozen=True)
class Reconstruction:
    """Original, masked and reconstructed images."""

    pictures: Mapping[str, Array]
    """Kind → images [image, row, column, channel] from 0 to 1, in the order in which they are drawn."""
    target_patches: Array
    """[image, target]: indices of the patches to predict, row by row."""
    losses: Array
    metrics: Mapping[str, float]
    """Metrics over all images, as in training."""


@torch.no_grad()
def reconstruct(wrapper: Pretraining, task: Masked, images: Tensor, *, seed: int = 0) -> Reconstruction:
    """Mask patches of normalised images as in training, chosen by `seed`, and predict them."""
    target, device = task.target, wrapper.encoder.norm.weight.device
    images = images.to(device)
    task.to(device)
    noise = torch.rand(len(images), wrapper.patches, wrapper.draws, generator=torch.Generator().manual_seed(seed)).to(device)
    with evaluating(wrapper):
        predicted, indices = wrapper(images, noise)
    targets, true = at(target.of(images), indices), target.patches(images)
    true_patches = at(true, indices)
    kinds = {"original": true, **_model_input(wrapper, true, noise, indices)}
    kinds[_prediction_name(wrapper)] = _replace(true, indices, target.to_pixels(predicted, true_patches))
    if isinstance(target, Colours):
        kinds["true colours"] = _replace(true, indices, target.colours(targets))
    meter = MaskedMeter(target)
    meter.update(MaskedPrediction(predicted.float(), targets, at(target.bins(images), indices)))
    pictures = {name: _unpatchify(patches, target) for name, patches in kinds.items()}
    return Reconstruction(pictures, indices.cpu().numpy(), target.loss(predicted, targets).cpu().numpy(), meter.metrics())


def _prediction_name(wrapper: Pretraining) -> str:
    return "reconstructed" if isinstance(wrapper, MaskedAutoencoder) else "predicted"


def _model_input(wrapper: Pretraining, patches: Tensor, noise: Tensor, indices: Tensor) -> dict[str, Tensor]:
    """Build the model's input: a masked patch is grey, a replaced patch shows its replacement."""
    grey = torch.full_like(at(patches, indices), _GREY)
    if not isinstance(wrapper, MaskedPatches):
        return {"visible": _replace(patches, indices, grey)}
    replaced = indices[:, wrapper.masked : wrapper.masked + wrapper.replaced]
    others = patches.flatten(0, 1)[wrapper.donors(replaced, noise[..., 1])]
    unchanged = at(patches, indices[:, wrapper.masked + wrapper.replaced :])
    return {"corrupted": _replace(patches, indices, torch.cat([grey[:, : wrapper.masked], others, unchanged], dim=1))}


def _replace(patches: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return patches.scatter(1, indices[..., None].expand(-1, -1, patches.shape[2]), values.to(patches.dtype))


def _unpatchify(patches: Tensor, target: PatchTarget) -> Array:
    (rows, columns), (height, width) = target.grid, target.stride
    images = patches.reshape(len(patches), rows, columns, target.channels, height, width).permute(0, 1, 4, 2, 5, 3)
    colours = images.reshape(len(patches), rows * height, columns * width, target.channels).cpu()
    if target.channels != 3:
        colours = colours.mean(dim=3, keepdim=True).expand(-1, -1, -1, 3)
    return colours.clamp(0, 1).double().numpy()


def run_folder(reference: str) -> Path:
    """Return the folder of a run, given the run or the model in it."""
    path = Path(reference).expanduser()
    return path.parent if path.name == "model" and (path.parent / "config.json").is_file() else path


def own_source(reference: str) -> str | None:
    """Return the data source that a run was trained on."""
    try:
        recipe: dict[str, Any] = read_json_object(run_folder(reference) / "config.json")["recipe"]
        return str(recipe["data"]["source"]) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def inspect_reconstruction(
    title: str, folder: str, reference: str, bundle: Bundle, inputs: PreprocessedImages, seed: int
) -> Section:
    """Draw the reconstructions of one run."""
    wrapper, task = load_parts(run_folder(reference), bundle.model, bundle.stored_preprocess())
    images = inputs.images[: len(inputs.pictures)]
    result = reconstruct(wrapper, task, images, seed=seed)
    metrics = result.metrics
    caption = (
        f"{_masking_text(wrapper)} {_target_text(task)} The loss on these images is {metrics['loss']:.4g}, "
        f"{metrics['relative_loss']:.1%} of the loss of the best constant prediction ({metrics['constant_loss']:.4g})."
    )
    rows = [("image", "loss"), *zip(inputs.names[: len(images)], result.losses.tolist(), strict=True)]
    info = {"checkpoint": reference, "model": bundle.model.config.name, "task": task.kind}
    arrays = {name.replace(" ", "_"): values for name, values in result.pictures.items()}
    arrays["target_patches"] = result.target_patches
    badge = NOT_IN_PAPER if isinstance(wrapper, MaskedAutoencoder) else "App. B.1.2"
    panel = Panel("reconstruction", "Reconstruction", caption, draw_reconstruction(result.pictures), arrays, rows, badge)
    return Section(title, folder, info, [panel])


def _masking_text(wrapper: Pretraining) -> str:
    if not isinstance(wrapper, MaskedPatches):
        return f"{wrapper.num_masked} of {wrapper.patches} patches per image are masked (grey)."
    unchanged = wrapper.num_masked - wrapper.masked - wrapper.replaced
    return (
        f"{wrapper.num_masked} of {wrapper.patches} patches per image are corrupted: {wrapper.masked} masked (grey), "
        f"{wrapper.replaced} replaced by other patches, {unchanged} unchanged."
    )


def _target_text(task: Masked) -> str:
    if task.kind == "masked-autoencoder":
        return "Pixels are predicted after normalising each patch; the drawing uses the true mean and standard deviation."
    if isinstance(task.target, Colours):
        what = "mean colour" if task.target.cells == 1 else "colours on a 4×4 grid"
        return f"The model predicts the {what} of each corrupted patch with 3 bits per channel; the most likely class is shown."
    return "The model predicts all pixels of each corrupted patch."


@styled
def draw_reconstruction(pictures: Mapping[str, Array]) -> Figure:
    """Draw up to two images per row, each with all its kinds side by side."""
    count, (height, width) = len(next(iter(pictures.values()))), next(iter(pictures.values())).shape[1:3]
    per_row, kinds = min(2, count), [*pictures]
    columns, rows = [*kinds, None] * per_row, -(-count // per_row)  # None: a gap after each image
    widths = [0.08 if kind is None else 1.0 for kind in columns[:-1]]
    wide, tall = fitted(height, width, (min(WIDTH / sum(widths), 1.6), 2.4))
    figure = Figure(figsize=(wide * sum(widths), rows * tall + 0.3), layout="constrained")
    tight(figure, 0.015)
    axes = figure.subplots(rows, len(widths), squeeze=False, width_ratios=widths)
    for (row, column), one in np.ndenumerate(axes):
        bare(one)
        kind, image = columns[column], row * per_row + column // (len(kinds) + 1)
        if kind is None or image >= count:
            one.set_visible(False)
            continue
        one.imshow(pictures[kind][image], interpolation="nearest")
        if row == 0:
            one.set_title(kind, fontsize=7)
    return figure
