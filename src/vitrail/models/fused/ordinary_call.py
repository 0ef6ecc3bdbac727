"""How modules are called: eagerly, with classes and functions as they were imported, or in a way that only modules can follow.

`whitelist.py` asks what a module is; a fast path needs both answers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_globals
from torch.utils._device import DeviceContext

from vitrail.models import attention, layers
from vitrail.models.attention import Attention
from vitrail.models.fused.folded_block import FoldedNorm
from vitrail.models.layers import LayerScale, Mlp, PatchEmbedding, StochasticDepth
from vitrail.models.positions import KINDS

POSITION_METHODS = frozenset({"at_input", "before_layer", "bias", "_add", "_table"})


def is_ordinary_call() -> bool:
    """Tell whether modules are called eagerly and by nothing but autograd's reverse mode, with classes as they were imported.

    Not so under torch.compile, export and tracing, under functorch's transforms (`torch.func.grad`, `vmap`), in forward-mode
    differentiation, in a mode of a user's own, with global module hooks, or after a method of a class was patched, or a function
    that these call.
    """
    return is_eager_call() and not is_patched()


def is_eager_call() -> bool:
    """Tell whether no compiler, transform, mode or global hook changes what a call does. Takes 1 µs, `is_patched` several."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if (torch._C._len_torch_function_stack() and _has_function_mode()) or _has_global_hooks():
        return False
    return not (torch._C._len_torch_dispatch_stack() and _has_dispatch_mode())


def is_patched() -> bool:
    """Tell whether a method of a whitelisted class, or a function that they call, is not the one that was imported."""
    for owner, name, function in imported_functions():
        found = getattr(owner, name)
        if found is not function and not (owner is F and _is_ours(found)):
            return True
    return False


def _is_ours(function: Any) -> bool:
    """Tell whether a function is this package's, as the dropout is with which memory is planned."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "vitrail"


def _has_function_mode() -> bool:
    """Tell whether a torch function mode is active that may replace what modules call; that of a default device does not."""
    modes = (torch._C._get_function_stack_at(number) for number in range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def _has_dispatch_mode() -> bool:
    """Tell whether a torch dispatch mode is active that may replace operators; torch's own and ours (fake tensors) do not."""
    modes = (torch._C._get_dispatch_stack_at(number) for number in range(torch._C._len_torch_dispatch_stack()))
    return any(type(mode).__module__.partition(".")[0] not in ("torch", "vitrail") for mode in modes)


def _has_global_hooks() -> bool:
    forward, backward = module_globals._global_forward_hooks, module_globals._global_backward_hooks
    return bool(forward or backward or module_globals._global_forward_pre_hooks or module_globals._global_backward_pre_hooks)


# What the modules call in `torch.nn.functional`: profilers, and packages with attention kernels of their own, replace it there.
_FUNCTIONS = ("linear", "layer_norm", "gelu", "dropout", "scaled_dot_product_attention")


@functools.cache
def imported_functions() -> tuple[tuple[Any, str, Any], ...]:
    """Each whitelisted class with its methods, and the functions that they call, as they were when this was first called.

    That is when `vitrail.models.vit` is imported.
    """
    from vitrail.models.vit import Block

    own = (Block, Attention, Mlp, StochasticDepth, LayerScale, FoldedNorm, PatchEmbedding)
    kinds: tuple[type[nn.Module], ...] = (*own, nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity)
    names: list[tuple[Any, str]] = [(kind, name) for kind in kinds for name in ("forward", "__call__", "_call_impl")]
    names += [(Block, "_add_branches"), (Attention, "_split"), (Attention, "_attend"), (Attention, "_merge")]
    names += [(attention, "sdpa"), (layers, "patchify")]
    names += [(kind, name) for kind in KINDS.values() for name in sorted(POSITION_METHODS)]
    methods = ((owner, name, getattr(owner, name)) for owner, name in names)
    return (*methods, *((F, name, _torchs_own(name)) for name in _FUNCTIONS))


def _torchs_own(name: str) -> Any:
    """Return a function of torch, also where another took its place before this package was imported."""
    function = getattr(F, name)
    of_torch = (getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch"
    return function if of_torch else getattr(torch._C._nn, name, None)
