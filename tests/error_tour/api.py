"""Errors of the Python interface: images, runs, fine-tuning."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import numpy as np
import torch

import vitrail
from tests.error_tour.case import at
from vitrail.api.finetuning import starting_recipe, with_changes
from vitrail.api.image_check import image_check
from vitrail.api.run_report import check_only_a_page
from vitrail.recipes import recipe_named

SMALL, LARGE = torch.zeros(3, 32, 32), torch.zeros(3, 64, 64)


@cache
def bundle() -> vitrail.Bundle:
    return vitrail.load("model")


def skipped_image() -> None:
    """Raise the error that a list of predictions keeps for an image that was skipped."""
    raise bundle().predict("text.jpg", bad_images="skip").bad[0]


# fmt: off
CASES = (
    at("api/run_report.py:check_only_a_page", lambda: check_only_a_page(Path("photos")),
       "photos would be replaced, but has other files (", "Move them, and run the same command again."),
    at("api/bundle.py:Bundle.predict", skipped_image, "text.jpg: a text file, not an image", "Replace or remove it."),
    at("api/finetuning.py:_reference", lambda: vitrail.finetune(bundle(), "photos"),
       "finetune starts from a checkpoint that can be loaded again, not from a loaded one.",
       "Pass its reference, such as 'model'; save a model that you changed, and pass the folder."),
    at("api/finetuning.py:starting_recipe#1", lambda: starting_recipe(None, "photos", None),
       "The checkpoint to start from is missing:", "add --from, such as --from ViT-B/16 or --from runs/digits."),
    at("api/finetuning.py:starting_recipe#2", lambda: vitrail.finetune("model"),
       "The images to train on are missing:", "add --data FOLDER (data= in Python), a folder with a folder for each class."),
    at("api/finetuning.py:with_changes", lambda: with_changes(recipe_named("digits"), {"optim": {"lrr": 1}}),
       "There is no setting optim.lrr.", "Did you mean optim.lr?", "`vitrail finetune --help-all` lists them."),
    at("api/image_check.py:image_check", lambda: image_check("al", recipe_named("digits"), say=print),
       "--check-images is 'al';", "it can be auto, all or none.", "Did you mean all?"),
    at("api/images.py:open_images#1", lambda: bundle().predict(["cat.jpg", SMALL]),
       "Preprocessed tensors and other images were given together.", "Give them in two calls."),
    at("api/images.py:open_images#2", lambda: bundle().predict(SMALL, split="val"),
       "split='val' selects a split of a data source, but tensors were given.", "Leave it out."),
    at("api/images.py:open_images#3", lambda: bundle().predict("cat.jpg", split="val"),
       "split='val' selects a split of a data source,", "such as 'folder:photos', but none was given."),
    at("api/images.py:_is_single", lambda: bundle().predict(3),
       "A value of type int is not an image.", "Pass paths of images, folders or .txt lists, open files or their bytes,"),
    at("api/images.py:_stacked#1", lambda: bundle().predict(torch.zeros(5)),
       "A float tensor of shape (5,) was given;", "[images, channels, height, width] is expected."),
    at("api/images.py:_stacked#2", lambda: bundle().predict([SMALL, LARGE]),
       "The tensors have several shapes, such as (3, 32, 32) and (3, 64, 64).", "Use one call for each shape."),
    at("api/images.py:_in_memory#1", lambda: bundle().predict([io.StringIO("text")]),
       "A file that was opened as text is not an image.", "Open it with mode 'rb', or pass its path."),
    at("api/images.py:_check_layout", lambda: bundle().predict(np.zeros((3, 40, 50), np.uint8)),
       "An array of shape (3, 40, 50) was given;", "[height, width, channels] is expected.",
       "Move its channels: numpy.moveaxis(array, -3, -1)."),
    at("api/images.py:_in_memory#2", lambda: bundle().predict([{"image": "cat.jpg"}]),
       "A value of type dict is not an image.", "Pass paths of images, folders or .txt lists, open files or their bytes,"),
    at("api/images.py:_in_memory#3", lambda: bundle().predict(np.zeros((4, 4, 3), np.float32)),
       "An array (4, 4, 3) of float32 is not an image.",
       "Pass pixel values from 0 to 255 as uint8; or, preprocessed already, a float tensor."),
    at("api/run.py:Run.recipe", lambda: vitrail.Run("empty").recipe,
       "empty holds no run.", "Pass a folder that `vitrail train` or `finetune` wrote."),
    at("api/run.py:Run.bundle", lambda: vitrail.Run("empty").bundle,
       "The run in empty is not finished and has no model yet.", "Run it again to resume."),
    at("api/run.py:Run.curves", lambda: vitrail.Run("empty").curves(),
       "The run in empty has no metrics yet, so there are no curves to draw.", "Run it again to resume."),
    at("api/run.py:Run.summary", lambda: vitrail.Run("empty").summary(),
       "The run in empty is not finished.", "Run it again to resume."),
    at("api/run.py:open_run#1", lambda: vitrail.open_run("runs/none"),
       "There is no folder runs/none.", "Pass a run folder, such as runs/digits."),
    at("api/run.py:open_run#2", lambda: vitrail.open_run("photos"),
       "photos holds no run: it has no config.json of one.", "Pass a folder that `vitrail train` wrote."),
)
# fmt: on
