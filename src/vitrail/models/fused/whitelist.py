"""What a fast path may replace: one exact list, checked at every call and never remembered.

A fused kernel or an inference copy computes what the modules of a plain block compute. Anything a user can change about a module
(another class, a hook, a patched `forward`, an adapter in place of a layer) must therefore be seen here, and takes the plain path.
The checks read `__dict__` directly: `nn.Module.__getattr__` would cost ten times as much, and this runs for every block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_globals
from torch.utils._device import DeviceContext

import vitrail.models.vit  # by its name, since that module imports this package
from vitrail.models.attention import Attention
from vitrail.models.fused.folded_norm import FoldedNorm
from vitrail.models.fused.launch import PLAIN_TENSORS
from vitrail.models.layers import LayerScale, Mlp, PatchEmbedding, StochasticDepth
from vitrail.models.positions import KINDS

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a hook of any kind sits on this module; FSDP2's own do not count, see `_fsdp_hooks`."""
    state = module.__dict__
    if not (state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]):
        return False
    own = _fsdp_hooks(module)
    return any(number not in own for kind in _HOOKS for number in state[kind])


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Tell whether a module is exactly a `kind` and runs that class's own `forward`, without hooks."""
    if type(module) is not kind:
        return False
    state = module.__dict__
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return False
    return "forward" not in state and "_compiled_call_impl" not in state and "_call_impl" not in state


def is_plain_block(block: nn.Module, *, layer_scale: bool = False, eval_mode: bool = False) -> bool:
    """Tell whether a block computes exactly equations 2 and 3 with the layers of the paper, as it is now.

    `layer_scale` also admits `LayerScale` on the branches. With `eval_mode` the block is judged as if it were in eval mode:
    dropout and stochastic depth, which a copy for inference switches off, then do not matter.
    """
    try:
        return _is_block(block) and _has_plain_parts(block.__dict__["_modules"], layer_scale, eval_mode)
    except KeyError:  # a part was deleted, and something else than a module put in its place
        return False


def _has_plain_parts(parts: dict[str, Any], layer_scale: bool, eval_mode: bool) -> bool:
    attention, mlp, skip, dropout = parts["attention"], parts["mlp"], parts["skip"], parts["dropout"]
    if type(attention) is not Attention or type(mlp) is not Mlp or type(skip) is not StochasticDepth:
        return False
    inner, outer = attention.__dict__["_modules"], mlp.__dict__["_modules"]
    norm1, norm2, qkv, out, up, down = parts["norm1"], parts["norm2"], inner["qkv"], inner["out"], outer["up"], outer["down"]
    scale1, scale2, mlp_dropout = parts["scale1"], parts["scale2"], outer["dropout"]
    if type(qkv) is not nn.Linear or type(out) is not nn.Linear or type(up) is not nn.Linear or type(down) is not nn.Linear:
        return False
    if type(dropout) is not nn.Dropout or type(mlp_dropout) is not nn.Dropout:
        return False
    scales = _SCALES if layer_scale else _NO_SCALES
    if type(scale1) not in scales or type(scale2) not in scales or type(norm1) not in _NORMS or type(norm2) not in _NORMS:
        return False
    for module in (attention, mlp, skip, dropout, norm1, norm2, qkv, out, up, down, scale1, scale2, mlp_dropout):
        state = module.__dict__  # as in `is_plain`, without a call for each
        if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
            return False
        if "forward" in state or "_compiled_call_impl" in state or "_call_impl" in state:
            return False
    state = attention.__dict__
    if "_split" in state or "_fused" in state or "_merge" in state:
        return False
    width, hidden = _norm_width(norm1), up.__dict__["out_features"]
    if not width or _norm_width(norm2) != width:
        return False
    if "q_norm" in inner or "k_norm" in inner:
        if not _has_plain_qk_norms(inner["q_norm"], inner["k_norm"], width // state["heads"]):
            return False
    elif state["q_norm"] is not None or state["k_norm"] is not None:
        return False
    if not (_has_plain_tensors(qkv, 3 * width, width) and _has_plain_tensors(out, width, width)):
        return False
    if not (_has_plain_tensors(up, hidden, width) and _has_plain_tensors(down, width, hidden)):
        return False
    if eval_mode:
        return True
    if dropout.p >= 1.0 or mlp_dropout.p >= 1.0 or skip.rate >= 1.0:  # nothing survives: the plain path knows how
        return False
    return not (attention.dropout > 0.0 and attention.training)


_NORMS = frozenset({nn.LayerNorm, FoldedNorm})
_NO_SCALES = frozenset({nn.Identity})
_SCALES = frozenset({nn.Identity, LayerScale})


class BlockShape(NamedTuple):
    """What kernels are chosen by, and were tested for."""

    width: int
    mlp: int
    heads: int
    tanh: bool
    qk_norm: bool


def device_and_shape(block: nn.Module) -> tuple[torch.device, BlockShape]:
    """Return where a plain block is, and its sizes."""
    parts = block.__dict__["_modules"]
    attention, mlp = parts["attention"].__dict__, parts["mlp"].__dict__
    qkv, up = attention["_modules"]["qkv"].__dict__, mlp["_modules"]["up"].__dict__
    qk_norm = "q_norm" in attention["_modules"]
    shape = BlockShape(qkv["in_features"], up["out_features"], attention["heads"], mlp["approximate"] == "tanh", qk_norm)
    return qkv["_parameters"]["weight"].device, shape


def has_precision(block: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether all parameters of a plain block are of this type. FSDP2 may gather others than it holds: then, too."""
    parts = block.__dict__["_modules"]
    inner, outer = parts["attention"].__dict__["_modules"], parts["mlp"].__dict__["_modules"]
    for module in (parts["norm1"], parts["norm2"], *inner.values(), outer["up"], outer["down"]):
        for parameter in module.__dict__["_parameters"].values():
            if parameter is not None and parameter.dtype != dtype:
                return is_sharded(block)
    return True


def is_ordinary_call() -> bool:
    """Tell whether modules are called eagerly and by nothing but autograd's reverse mode, with classes as they were imported.

    Not so under torch.compile, export and tracing, under functorch's transforms (`torch.func.grad`, `vmap`), in forward-mode
    differentiation, in a torch function mode, with global module hooks, or after a method of a class was patched.
    """
    return is_eager_call() and not is_patched()


def is_eager_call() -> bool:
    """Tell whether no compiler, transform, mode or global hook changes what a call does. Takes 1 µs, `is_patched` several."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return not ((torch._C._len_torch_function_stack() and _has_function_mode()) or _has_global_hooks())


def is_patched() -> bool:
    """Tell whether a method of a whitelisted class is not the one that was imported."""
    return any(getattr(kind, name) is not method for kind, name, method in class_methods())


def _has_function_mode() -> bool:
    """Tell whether a torch function mode is active that may replace what modules call; that of a default device does not."""
    modes = (torch._C._get_function_stack_at(number) for number in range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def _has_global_hooks() -> bool:
    forward, backward = module_globals._global_forward_hooks, module_globals._global_backward_hooks
    return bool(forward or backward or module_globals._global_forward_pre_hooks or module_globals._global_backward_pre_hooks)


_UNIT_STRIDE = (1,)  # of biases and norm weights: kernels read them without strides


def is_plain_tensor(tensor: Any) -> bool:
    """Tell whether a tensor is torch's own (or a fake one, for planning) and not a subclass with arithmetic of its own."""
    if type(tensor) in PLAIN_TENSORS:
        return True
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) is FakeTensor


def is_plain_norm(norm: nn.Module, width: int) -> bool:
    """Tell whether a norm is exactly torch's layer norm over the last axis, with weight and bias."""
    return is_plain(norm, nn.LayerNorm) and _norm_width(norm) == width


def are_plain_positions(positions: nn.Module) -> bool:
    """Tell whether positions are of one of our kinds and add to tokens what their class says."""
    # Not `isdisjoint`: torch 2.11 cannot compile it for the dictionary of a module.
    return type(positions) in _POSITIONS and not any(name in positions.__dict__ for name in _POSITION_METHODS)


_POSITIONS = frozenset(KINDS.values())
_POSITION_METHODS = frozenset({"at_input", "_add", "_table"})


def _has_plain_tensors(module: nn.Linear, rows: int, columns: int) -> bool:
    """Tell whether a linear layer has a weight and a bias of these sizes that kernels can read."""
    parameters = module.__dict__["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or "bias" not in parameters:  # replaced by an attribute or a parametrisation
        return False
    if weight.shape != (rows, columns) or not (type(weight) in PLAIN_TENSORS or _is_own(weight)):
        return False
    return bias is None or (
        bias.numel() == rows and bias.stride() == _UNIT_STRIDE and (type(bias) in PLAIN_TENSORS or _is_own(bias))
    )


def _has_plain_qk_norms(q_norm: Any, k_norm: Any, channels: int) -> bool:
    return is_plain_norm(q_norm, channels) and is_plain_norm(k_norm, channels) and q_norm.eps == k_norm.eps


def _norm_width(norm: Any) -> int:
    """Return the width of a layer norm over the last axis, with weight and bias or folded; 0 for anything else."""
    if type(norm) is FoldedNorm:
        width: int = norm.normalized_shape[0]
        return width
    parameters = norm.__dict__["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or bias is None or weight.stride() != _UNIT_STRIDE or bias.stride() != _UNIT_STRIDE:
        return 0
    if not (type(weight) in PLAIN_TENSORS or _is_own(weight)) or not (type(bias) in PLAIN_TENSORS or _is_own(bias)):
        return 0
    width = weight.numel()
    return width if bias.numel() == width else 0


def _is_own(parameter: Any) -> bool:
    return is_plain_tensor(parameter) or _is_shard(parameter)


def _is_shard(parameter: Any) -> bool:
    """Tell whether this is a shard that FSDP2 puts together before the block runs."""
    from torch.distributed.tensor import DTensor

    return type(parameter) is DTensor


def _is_block(block: nn.Module) -> bool:
    state = block.__dict__
    if "forward" in state or "_add_branches" in state or has_hooks(block):
        return False
    if "_compiled_call_impl" in state or "_call_impl" in state:
        return False
    # FSDP2 gathers parameters for `forward_pending` only where that is registered with it, which puts it on the instance.
    return type(block) is vitrail.models.vit.Block or (is_sharded(block) and "forward_pending" in state)


def is_sharded(block: nn.Module) -> bool:
    """Tell whether this is a block of which FSDP2 has made its own class, and which has no other change."""
    bases = type(block).__bases__
    if len(bases) != 2 or bases[1] is not vitrail.models.vit.Block:
        return False
    from torch.distributed.fsdp import FSDPModule

    return bases[0] is FSDPModule


def _fsdp_hooks(module: nn.Module) -> set[int]:
    """Return the numbers of the two hooks by which FSDP2 gathers and frees a module's parameters.

    It does the same around `Block.forward_pending`, so they do not count as hooks of a user.
    """
    if not hasattr(module, "_get_fsdp_state"):
        return set()
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    return {handle.id for handle in handles if handle is not None}


@functools.cache
def class_methods() -> tuple[tuple[type[nn.Module], str, Any], ...]:
    """Each whitelisted class with its methods as they were when this was first called: by `vitrail.models`, when it is imported."""
    from vitrail.models.vit import Block

    kinds = (
        Attention,
        Mlp,
        StochasticDepth,
        LayerScale,
        FoldedNorm,
        PatchEmbedding,
        nn.Linear,
        nn.LayerNorm,
        nn.Dropout,
        nn.Identity,
    )
    methods: list[tuple[type[nn.Module], str]] = [(kind, "forward") for kind in (Block, *kinds)]
    methods += [(Block, "_add_branches"), (Attention, "_split"), (Attention, "_fused"), (Attention, "_merge")]
    methods += [(kind, name) for kind in KINDS.values() for name in sorted(_POSITION_METHODS)]
    return tuple((kind, name, getattr(kind, name)) for kind, name in methods)
