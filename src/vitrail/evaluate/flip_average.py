"""Test-time augmentation: average the predictions of an image and its mirror image."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.models import Model
from vitrail.models.inference import InferenceModel


def flip_average(bundle: Bundle, model: Model | InferenceModel) -> Callable[[Tensor], Tensor]:
    """Return a function from images to outputs whose probabilities are the mean over each image and its mirror image.

    They are outputs like the model's own: softmax or sigmoid turns them into the mean probabilities. The values of a regression
    are averaged themselves.
    """

    def outputs(images: Tensor) -> Tensor:
        one, two = model(images).float(), model(images.flip(-1)).float()
        if bundle.task == "regress":
            return torch.stack([one, two]).mean(0)
        if bundle.sigmoid:  # the logit of the mean, from logarithms: a mean of 1 − 1e-9 would be rounded to 1
            yes, no = (torch.logaddexp(F.logsigmoid(sign * one), F.logsigmoid(sign * two)) for sign in (1, -1))
            return yes - no
        return torch.logaddexp(one.log_softmax(1), two.log_softmax(1)) - math.log(2)

    return outputs
