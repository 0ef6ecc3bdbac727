"""Errors of looking into models: attention, rollout, filters, reconstructions and their reports."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitrail
from tests.error_tour.case import at
from tests.error_tour.evaluate_models import bundle, split
from tests.error_tour.files import scratch
from tests.inspect import known_attention
from vitrail import inspect
from vitrail.data.types import Source
from vitrail.evaluate.predictor import find_images
from vitrail.inspect import images as images_module
from vitrail.inspect.draw import draw_distance_comparison
from vitrail.inspect.images import from_source, from_split, preprocess_images
from vitrail.inspect.inspection import check_amounts, check_reconstruction, short_names
from vitrail.inspect.layers import layer_outputs
from vitrail.inspect.report import check_output_folder
from vitrail.models import ViT
from vitrail.models.inference import for_inference


@cache
def model(**changes: Any) -> ViT:
    """A small model that looks trained, with a grid of 3×4 patches."""
    made = known_attention.tiny((3, 4), **changes)
    nn.init.normal_(made.norm.bias)
    return made


@cache
def nan_model() -> ViT:
    made = known_attention.tiny((3, 4))
    for parameter in made.parameters():
        nn.init.constant_(parameter, float("nan"))
    return made


def images(count: int = 2) -> torch.Tensor:
    return known_attention.images(model(), count)


def in_two_sizes() -> object:
    wide = known_attention.tiny((3, 4), any_size=True)
    nn.init.normal_(wide.norm.bias)
    return inspect.rollout(wide, [torch.zeros(1, 3, 24, 16), torch.zeros(1, 3, 16, 24)])


def compare_nine() -> object:
    values = {str(k): np.ones((2, 2)) for k in range(9)}
    return draw_distance_comparison(values, layers={name: np.arange(2) for name in values}, uniform=[1.0] * 9, images=1)


def empty_val(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(images_module, "open_for", lambda *_, **__: Source(reference="photos", kind="folder", splits={"val": split(0)}))


def inspect_text() -> object:
    return preprocess_images(bundle(), from_split(find_images(["text.jpg"]), None, 0), 1)


def inspection() -> Path:
    folder = scratch()
    for name in ("index.html", "inspection.json"):
        (folder / name).write_text("")
    return folder


CASES = (
    # models and images
    at("inspect/inputs.py:checked_vit#1", lambda: inspect.rollout(vitrail.create_model("BiT-R50x1", device="meta"), images()),
       "BiT-R50x1 is a ResNet: it has no attention and no position embeddings.", "use vitrail.inspect.filters."),
    at("inspect/inputs.py:checked_vit#2", lambda: inspect.rollout(nn.Linear(2, 2), images()),
       "This is a torch.Linear, not one of Vitrail's models.", "Build it with vitrail.create_model, or load its weights"),
    at("inspect/inputs.py:checked_vit#2", lambda: inspect.rollout(for_inference(model()), images()),  # type: ignore[arg-type]
       "This copy was made for inference: its weights are packed and folded.", "Inspect the model it was made from."),
    at("inspect/inputs.py:checked_model", lambda: inspect.filters(nn.Linear(2, 2)),
       "This is a torch.Linear, not one of Vitrail's models.", "Build it with vitrail.create_model, or load its weights"),
    at("inspect/inputs.py:untrained", lambda: inspect.filters(vitrail.create_model("ViT-Ti/16", device="meta")),
       "ViT-Ti/16 is on the meta device, so it has no weights.", "Load a checkpoint first."),
    at("inspect/inputs.py:in_batches#1", lambda: inspect.rollout(model(), images(), batch=0), "batch is 0;", "use 1 or more."),
    at("inspect/inputs.py:in_batches#2", in_two_sizes,
       "Images of 16×24 and 24×16 cannot be in one figure;", "pass images of one size at a time."),
    at("inspect/inputs.py:in_batches#3", lambda: inspect.rollout(model(), images(0)),
       "No images were given;", "pass at least one."),
    at("inspect/inputs.py:check_patch", lambda: inspect.head_attention(model(), images(), (3, 0)),
       "There is no patch in row 3, column 0:", "the grid is 3×4, counted from 0 at the top left."),
    at("inspect/inputs.py:finite", lambda: inspect.rollout(model(), images() * float("nan")),
       "NaN or infinity in the rollout.", "check the images and the weights, or use model.float()."),
    at("inspect/inputs.py:finite", lambda: inspect.filters(nan_model()),
       "NaN or infinity in the filters.", "check the images and the weights, or use model.float()."),
    at("inspect/images.py:from_source", lambda: from_source(bundle(), "photos", None, 1, 0),
       "The split 'val' of photos has no images.", "Choose another one.", patch=empty_val),
    at("inspect/images.py:_unusable", inspect_text,
       "text.jpg: a text file, not an image", "Replace it, or use other images."),
    # attention, rollout, weights
    at("inspect/distance.py:attention_distance",
       lambda: inspect.attention_distance(model(), images(), among="tokens"),  # type: ignore[arg-type]
       "among is 'tokens';", "it can be 'patches' or 'all'."),
    at("inspect/distance.py:_prefix_token", lambda: inspect.head_attention(model(), images(), 1),
       "There is no prefix token 1:", "has only prefix token 0.", "Give a patch as (row, column)."),
    at("inspect/draw.py:draw_distance_comparison", compare_nine,
       "9 checkpoints are too many for one figure;", "compare at most 7."),
    at("inspect/rollout.py:rollout", lambda: inspect.rollout(model(), images(), fusion="sum"),  # type: ignore[arg-type]
       "fusion is 'sum';", "it can be 'mean', 'max' or 'min'."),
    at("inspect/rollout.py:gradient_rollout#1", lambda: inspect.gradient_rollout(model(), iter([images()]), [0, 1]),
       "not as an iterable of batches.", "`outputs` needs one output per image, so pass the images as one batch"),
    at("inspect/rollout.py:gradient_rollout#2", lambda: inspect.gradient_rollout(model(), images(1), [0, 1]),
       "`outputs` has length 2 for 1 image;", "pass one per image."),
    at("inspect/rollout.py:highest_outputs", lambda: inspect.gradient_rollout(model(outputs=0), images()),
       "has no head, so there is no output to differentiate.", "Use rollout instead."),
    at("inspect/layers.py:layer_outputs", lambda: layer_outputs(model(outputs=0), np.zeros((1, 3, 13, 24), np.float32)),
       "has no head, so no outputs can be read out.", "Load a checkpoint with a head."),
    at("inspect/weights.py:filters", lambda: inspect.filters(model(), 0), "components is 0;", "use 1 or more."),
    at("inspect/weights.py:position_vectors#1", lambda: inspect.position_similarity(model(), 1),
       "There is no position embedding for layer 1:", "has one position embedding for all layers."),
    at("inspect/weights.py:position_vectors#2", lambda: inspect.position_similarity(model(position="none")),
       "has no position embedding,", "so there are no position vectors to compare."),
    # the command and its report
    at("inspect/inspection.py:short_names", lambda: short_names(["runs/a", "runs/a/model"]),
       "The same checkpoint was given twice: runs/a, runs/a/model.", "Pass different checkpoints to compare."),
    at("inspect/inspection.py:check_reconstruction#1",
       lambda: check_reconstruction(["model", "nowhere"], has_images=True, resized=False),
       "There is no folder nowhere.", "Reconstructions need a run with --task.kind masked-patch or masked-autoencoder."),
    at("inspect/inspection.py:check_reconstruction#2", lambda: check_reconstruction(["model"], has_images=False, resized=False),
       "Reconstructions need images:", "pass image files, or a data source such as folder:DIR (--data on the command line)."),
    at("inspect/inspection.py:check_reconstruction#3", lambda: check_reconstruction(["model"], has_images=True, resized=True),
       "--image-size does not work with reconstructions:", "Leave it out."),
    at("inspect/inspection.py:check_amounts", lambda: check_amounts(count=8, show=0), "show is 0;", "use 1 or more."),
    at("inspect/report.py:check_output_folder#1", lambda: check_output_folder(Path("notes.txt"), overwrite=True),
       "notes.txt is a file,", "but an inspection is a folder.", "Choose another name for --out."),
    at("inspect/report.py:check_output_folder#2", lambda: check_output_folder(Path("photos"), overwrite=True),
       "photos already contains other files (train, val).", "Choose another name for --out."),
    at("inspect/report.py:check_output_folder#3", lambda: check_output_folder(inspection(), overwrite=False),
       "already contains an inspection.", "Pass --overwrite to replace it, or choose another name."),
)  # fmt: skip
