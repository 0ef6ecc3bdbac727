"""Keep an inference copy between calls, as long as the model has not changed: making one can take longer than an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vitrail.evaluate.context import EvalContext
from vitrail.models import Model
from vitrail.models.inference import InferenceModel


@dataclass
class KeptCopy:
    """The latest inference copy of a model, and the state of the model that it was made from."""

    state: Any = None
    copy: Model | InferenceModel | None = None


@dataclass(frozen=True, kw_only=True)
class CachingContext(EvalContext):
    """An evaluation context that uses the inference copy of an earlier call if the model has not changed since."""

    kept: KeptCopy = field(default_factory=KeptCopy)

    def prepare(self, model: Model) -> Model | InferenceModel:
        if not self._uses_inference_copy:
            return super().prepare(model)
        state = (self.precision, self.world.device, self.any_size, model_state(model))
        if self.kept.copy is None or self.kept.state != state:
            self.kept.state, self.kept.copy = state, super().prepare(model)
        return self.kept.copy


@torch.no_grad()
def model_state(model: Model) -> Any:
    """Return what differs after any change of a model: its config, modules, hooks, and versions, norms and sums of its weights.

    A tensor that is changed in place has a new version. A change through `.data` has none; there the numbers differ.
    """
    tensors = [*model.parameters(), *model.buffers()]
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(floats)]).tolist()
    sums = torch.stack([tensor.sum().float() for tensor in floats]).tolist()
    modules = [(id(module), tuple(module._forward_hooks), tuple(module._forward_pre_hooks)) for module in model.modules()]
    return model.config, modules, [(id(tensor), tensor._version) for tensor in tensors], norms, sums
