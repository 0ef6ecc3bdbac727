"""Keep an inference copy between calls, as long as the model has not changed: making one can take longer than an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.evaluate.context import EvalContext
from vitrail.models import Model
from vitrail.models.inference import InferenceModel


class KeptCopy:
    """The latest inference copy of a model, with the state of the model that it was made from."""

    def __init__(self) -> None:
        # One value, so that a thread never sees the state of one copy next to another copy.
        self._latest: tuple[Any, Model | InferenceModel] | None = None

    def get(self, state: Any, make: Callable[[], Model | InferenceModel]) -> Model | InferenceModel:
        """Return the copy of this state; make it if the latest is of another one."""
        latest = self._latest
        if latest is None or latest[0] != state:
            latest = self._latest = (state, make())
        return latest[1]

    def __deepcopy__(self, memo: Any) -> KeptCopy:
        return KeptCopy()  # a copied or unpickled model has another state: its copy would be dead weight

    def __reduce__(self) -> tuple[type[KeptCopy], tuple[()]]:
        return KeptCopy, ()


@dataclass(frozen=True, kw_only=True)
class CachingContext(EvalContext):
    """An evaluation context that uses the inference copy of an earlier call if the model has not changed since."""

    kept: KeptCopy = field(default_factory=KeptCopy)

    def prepare(self, model: Model) -> Model | InferenceModel:
        if not self._uses_inference_copy:
            return super().prepare(model)
        state = (self.precision, self.world.device, self.any_size, model_state(model))
        return self.kept.get(state, lambda: EvalContext.prepare(self, model))


@torch.no_grad()
def model_state(model: Model) -> Any:
    """Return what differs after any change of a model: config, modules with hooks and attributes, versions and sums of tensors.

    A tensor that is changed in place has a new version. A change through `.data` or a NumPy view has none; there the sums differ:
    each value has a weight by its row and column, so that swapped values count, too.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sums = torch.stack([_weighted_sum(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]).tolist()
    modules = [_module_state(module) for module in model.modules()]
    # NaN is not equal to itself, but its text is: a model with NaN is not copied at every call.
    return model.config, modules, [(id(tensor), tensor._version) for tensor in tensors], repr(sums)


def _weighted_sum(values: Tensor) -> Tensor:
    rows = values.reshape(len(values) if values.ndim else 1, -1).float()
    left, right = (1 + torch.arange(n, device=rows.device).mul(0.618034).frac() for n in rows.shape)
    return left @ (rows @ right)


def _module_state(module: nn.Module) -> Any:
    """Return what decides a module's function besides its tensors: its type, hooks, a patched forward, numbers such as eps."""
    own = {name: value for name, value in vars(module).items() if name != "training"}
    plain = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str)}
    functions = {name: id(value) for name, value in own.items() if callable(value) and not isinstance(value, nn.Module)}
    return id(module), type(module), tuple(module._forward_hooks), tuple(module._forward_pre_hooks), plain, functions
