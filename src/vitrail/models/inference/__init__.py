"""`for_inference`: a copy of a model that is as fast as the machine it runs on allows."""

from __future__ import annotations

import torch

from vitrail.errors import VitrailError
from vitrail.models import Model
from vitrail.models.inference.cpu import cpu_copy
from vitrail.models.inference.model import InferenceModel, deep_copied
from vitrail.models.inference.precision import PrecisionChoice, choose
from vitrail.models.settings import Precision

__all__ = ["InferenceModel", "Precision", "PrecisionChoice", "choose", "for_inference"]


def for_inference(model: Model, precision: Precision = "auto", device: torch.device | str | None = None) -> InferenceModel:
    """Copy a model for inference, to the given device or its own. The model itself stays as it is.

    `fp32` computes what the model does in eval mode, to within rounding. `bf16` and `int8` round more and are faster; `auto` takes
    the fastest that is still right on this machine, and `choose` says which. An image's result does not depend on the other images
    of its batch. Parts of a model that are not exactly the paper's (adapters, other norms, hooks) are copied as they are.
    """
    if isinstance(model, InferenceModel):
        raise VitrailError("This is a copy made for inference already. Call for_inference with the model it was made from.")
    current = next(model.parameters()).device
    device = _with_index(torch.device(device)) if device is not None else current
    choice = choose(model.config, precision, device)
    if device.type == "cuda":
        from vitrail.models.inference.gpu import gpu_copy

        return gpu_copy(model, device, torch.bfloat16 if choice.precision == "bf16" else torch.float32)
    if device.type == "cpu":
        return cpu_copy(model if current == device else deep_copied(model).to(device), choice.block_precision)
    return InferenceModel(deep_copied(model).to(device, torch.float32))


def _with_index(device: torch.device) -> torch.device:
    """Name the GPU that "cuda" means now: another may be the current one when the copy is called."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
