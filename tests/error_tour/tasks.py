"""Errors of training tasks: targets that cannot be learned, teachers that do not fit."""

from __future__ import annotations

import numpy as np
import torch

from tests.error_tour.case import Case, at
from vitrail.data.preprocess import preset
from vitrail.tasks import Classify, Distill, Regress
from vitrail.tasks.distill import check_classes
from vitrail.tasks.masked import compute_baseline
from vitrail.tasks.patch_targets import Colours

RGB = preset("google-vit", size=32)


def distill(channels: int) -> Distill:
    student, classes = preset("google-vit", size=32, channels=channels), ("cat", "dog")
    return Distill(
        Classify(2), torch.nn.Identity(), classes=classes, teacher_classes=classes, preprocess=student, teacher_preprocess=RGB
    )


CASES: tuple[Case, ...] = (
    at("tasks/distill.py:Distill.__init__", lambda: distill(1), "The teacher has 3 input channels, the student 1.",
       "Use --model.channels 3, or another teacher."),
    at("tasks/distill.py:check_classes#1", lambda: check_classes(("cat", "dog"), ("dog", "cat")),
       "output 0 is 'cat' here and 'dog' in the teacher.", "Load the data with the teacher's class order."),
    at("tasks/distill.py:check_classes#2", lambda: check_classes(("cat", "fox"), ("cat", "dog", "owl")),
       "different classes: 2 and 3; the teacher does not know 'fox'; only the teacher knows 'dog'.",
       "Distill on data with the teacher's classes, or fine-tune the teacher on these first."),
    at("tasks/masked.py:Baseline.check",
       lambda: compute_baseline(Colours(RGB, (8, 8)), [torch.zeros(2, 3, 32, 32)]).check("google-vit"),
       "All targets fall in 1 of 512 bins (entropy 0.00 bits over 2 images)", "pixels that fill 0 to 1 when google-vit is undone",
       "check --data.preprocess"),
    at("tasks/patch_targets.py:Colours.__init__#1", lambda: Colours(preset("google-vit", size=32, channels=5), (8, 8)),
       "these images have 5.", "for up to 3 channels;", "Use --task.patch-target pixels."),
    at("tasks/patch_targets.py:Colours.__init__#2", lambda: Colours(RGB, (2, 2), cells=4),
       "A patch of 2×2 pixels cannot be downsized to 4×4.", "Use --task.patch-target mean-colour or pixels."),
    at("tasks/regress.py:Regress.__init__#1", lambda: Regress(np.array([[1.0], [np.nan]]), ("age",)),
       "The targets of training image 1 are [nan]:", "a regression needs finite numbers.", "Correct or remove that row."),
    at("tasks/regress.py:Regress.__init__#2", lambda: Regress(np.array([[1.0, 2.0], [3.0, 2.0]]), ("age", "size")),
       "The target 'size' is the same for every training image:", "there is nothing to learn. Remove it."),
)  # fmt: skip
