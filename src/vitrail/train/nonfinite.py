"""Find where non-finite numbers first appear, and suggest what to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.train.shards import local

_LARGEST = {torch.float16: 65504.0}

NOT_AGAIN = "it did not occur again when the step was repeated, so it depends on the order of additions or on faulty memory"
_IN_GRADIENT = "forward is finite; first in the gradient of"


class Diverged(VitrailError):
    """A run ended because a loss, a gradient or a weight was not finite."""


def first_fault(model: nn.Module, compute: Callable[[], Tensor], *, computes_all: bool = False) -> str:
    """Return the first place where `compute`, which runs the model to a loss, has a non-finite number.

    With `computes_all`, forward and backward run to their ends whatever was found. FSDP2 communicates in both, so all ranks must
    take part; gradients must be summed over ranks in `compute`, since only then FSDP2 leaves them with the parameters.
    """
    weight = next((name for name, one in model.named_parameters() if not _finite(one)), None)
    if weight is not None and not computes_all:
        return f"the weight {weight} itself is not finite"
    faults: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    hooks = [module.register_forward_hook(_watch(faults, names[module])) for module in names if module is not model]
    try:
        with torch.enable_grad():
            loss = compute()
            if computes_all or (not faults and _finite(loss)):
                loss.sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    if weight is not None:
        return f"the weight {weight} itself is not finite"
    if faults:
        return f"first in {faults[0]}"
    if not _finite(loss):
        return "first in the loss; every layer's output is finite"
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"{_IN_GRADIENT} {name}"
    return NOT_AGAIN


def earliest_fault(faults: Iterable[str]) -> str:
    """Return the first of several ranks' or micro-batches' faults, one in a gradient only if there is no other: FSDP2 sums
    gradients over ranks, so that a fault in one rank's forward pass shows in the gradients of all."""
    return min(faults, key=lambda one: (one == NOT_AGAIN, one.startswith(_IN_GRADIENT)))


def _watch(faults: list[str], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if faults or not isinstance(output, Tensor) or _finite(output):
            return
        given = [one for one in inputs if isinstance(one, Tensor)]
        if not all(_finite(one) for one in given):
            # An outer module sees its own input; what came in broken here broke outside any module before it.
            faults.append(f"the input of {name}")
            return
        largest = max((float(one.detach().abs().max()) for one in given), default=0.0)
        limit = _LARGEST.get(output.dtype)
        beyond = f", and {str(output.dtype).removeprefix('torch.')} ends at {limit:g}" if limit else ""
        faults.append(f"{name} (its input reaches {largest:.3g}{beyond})")

    return hook


def _finite(tensor: Tensor) -> bool:
    """Tell whether a tensor, or this rank's shard of it, is finite."""
    return bool(local(tensor.detach()).isfinite().all())


def nonfinite_weight(tensors: dict[str, Tensor]) -> str:
    """Return the first of a checkpoint's weights, raw or averaged, that is not finite on this rank; empty if all are."""
    names = [name for name, one in tensors.items() if name.startswith(("model.", "ema.")) and one.is_floating_point()]
    if not names or bool(torch.stack([local(tensors[name]).isfinite().all() for name in names]).all()):  # synchronises once
        return ""
    return next(name for name in names if not _finite(tensors[name])).partition(".")[2]


def advice(precision: str, lr: float, policy: str) -> str:
    """Return what to try, the most likely fix first. `policy` is the run's `on_nonfinite`."""
    cures = ["--precision bf16 (or fp32)"] if precision == "fp16" else []
    cures += [f"a lower --optim.lr than {lr:g}", "a longer --schedule.warmup"]
    others = " or ".join(one for one in ("skip", "rollback") if one != policy)
    return f"Try {', '.join(cures)}, or skip such batches with --on-nonfinite {others}."
