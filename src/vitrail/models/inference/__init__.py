"""`for_inference`: a model as fast as the machine it runs on allows."""

from __future__ import annotations

import copy

import torch

from vitrail.models import Model
from vitrail.models.inference.choosing import Chosen, Precision, choose
from vitrail.models.inference.copies import fast_copy

__all__ = ["Chosen", "Precision", "choose", "for_inference"]


def for_inference(model: Model, precision: Precision = "auto", device: torch.device | str | None = None) -> Model:
    """A copy of the model for computing with, not for training. The model itself stays as it is.

    `fp32` gives what the model gives, to within rounding. `bf16` and `int8` round more and are faster; `auto` takes what is
    fastest and still right on this machine, and `choose` says what that is. Every image's result is its own: it does not
    depend on what else is in the batch.
    """
    place = torch.device(device) if device is not None else model.norm.weight.device
    chosen = choose(model.config, precision, place)
    if place.type == "cuda":
        from vitrail.models.inference.gpu import gpu_copy

        return gpu_copy(model, place, torch.bfloat16 if chosen.precision == "bf16" else torch.float32)
    if place.type == "cpu":
        return fast_copy(model if model.norm.weight.device == place else copy.deepcopy(model).to(place), chosen.style)
    return copy.deepcopy(model).to(place).eval().requires_grad_(False)
