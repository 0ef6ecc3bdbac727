"""What a fast path may replace: one exact list, checked at every call and never remembered.

A fused kernel or an inference copy computes what the modules of a plain block compute. Anything a user can change about a module
(another class, a hook, a patched `forward`, an adapter in place of a layer) must therefore be seen here, and takes the plain path.
The checks read `__dict__` directly: `nn.Module.__getattr__` would cost ten times as much, and this runs for every block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import vitrail.models.vit  # by its name, since that module imports this package
from vitrail.models.attention import Attention
from vitrail.models.fused.folded_block import FoldedNorm
from vitrail.models.fused.launch import PLAIN_TENSORS
from vitrail.models.fused.ordinary_call import POSITION_METHODS
from vitrail.models.fused.sharded import fsdp_hooks, is_sharded
from vitrail.models.layers import LayerScale, Mlp, StochasticDepth
from vitrail.models.positions import KINDS, Positions

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a hook of any kind sits on this module; FSDP2's own do not count, see `sharded.py`."""
    state = module.__dict__
    if not (state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]):
        return False
    own = fsdp_hooks(module)
    return any(number not in own for kind in _HOOKS for number in state[kind])


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Tell whether a module is exactly a `kind` and runs that class's own `forward`, without hooks."""
    if type(module) is not kind:
        return False
    state = module.__dict__
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return False
    return "forward" not in state and "_compiled_call_impl" not in state and "_call_impl" not in state


AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The precisions that autocast casts, as kernels do; float64 it leaves. The usual one comes first: every parameter is looked up."""

# Width, MLP width, heads, GELU's tanh form, qk_norm: what kernels are chosen by, and were tested for.
BlockShape = tuple[int, int, int, bool, bool]


def is_plain_block(block: nn.Module, *, layer_scale: bool = False, eval_mode: bool = False) -> bool:
    """Tell whether a block computes exactly equations 2 and 3 with the layers of the paper, as it is now.

    `layer_scale` also admits `LayerScale` on the branches. With `eval_mode` the block is judged as if it were in eval mode:
    dropout and stochastic depth, which a copy for inference switches off, then do not matter.
    """
    return shape_of_block(block, layer_scale=layer_scale, eval_mode=eval_mode) is not None


def shape_of_block(
    block: nn.Module, device: int | None = None, dtypes: tuple[torch.dtype, ...] | None = None,
    *, layer_scale: bool = False, eval_mode: bool = False,
) -> BlockShape | None:  # fmt: skip
    """Return the sizes of a plain block; None for one that is not plain, or has a parameter on another device or of another dtype.

    `device` is `get_device()` of the tokens: the number of a GPU, or -1. None: any, but one for all parameters. `dtypes`: those
    that parameters may have; None: any.
    """
    try:
        parts = block.__dict__["_modules"]
        states = _states_of_parts(parts, layer_scale) if _is_block(block) else None
        if states is None or not (eval_mode or _has_known_dropout(states)):
            return None
        if layer_scale and not (_scales_channels(parts["scale1"], states) and _scales_channels(parts["scale2"], states)):
            return None
        return _shape_of_parts(parts, states, device, dtypes)
    except KeyError:  # a part or a parameter was deleted, and something else put in its place
        return None


_State = dict[str, Any]  # the `__dict__` of a module


def _states_of_parts(parts: dict[str, Any], layer_scale: bool) -> tuple[_State, ...] | None:
    """Return the state of each part of a block but the norms of queries and keys; None where one of them is not plain."""
    attention, mlp, skip, dropout = parts["attention"], parts["mlp"], parts["skip"], parts["dropout"]
    if type(attention) is not Attention or type(mlp) is not Mlp or type(skip) is not StochasticDepth:
        return None
    attention_state, mlp_state = attention.__dict__, mlp.__dict__
    inner, outer = attention_state["_modules"], mlp_state["_modules"]
    norm1, norm2, qkv, out, up, down = parts["norm1"], parts["norm2"], inner["qkv"], inner["out"], outer["up"], outer["down"]
    scale1, scale2, mlp_dropout = parts["scale1"], parts["scale2"], outer["dropout"]
    if type(qkv) is not _Linear or type(out) is not _Linear or type(up) is not _Linear or type(down) is not _Linear:
        return None
    if type(dropout) is not _Dropout or type(mlp_dropout) is not _Dropout:
        return None
    scales = _SCALES if layer_scale else _NO_SCALES
    if type(scale1) not in scales or type(scale2) not in scales or type(norm1) not in _NORMS or type(norm2) not in _NORMS:
        return None
    states = (
        attention_state, mlp_state, qkv.__dict__, out.__dict__, up.__dict__, down.__dict__, skip.__dict__, dropout.__dict__,
        mlp_dropout.__dict__, norm1.__dict__, norm2.__dict__, scale1.__dict__, scale2.__dict__,
    )  # fmt: skip
    for state in states:  # as in `is_plain`, without a call for each
        if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
            return None
        if "forward" in state or "_compiled_call_impl" in state or "_call_impl" in state:
            return None
    return None if "_split" in attention_state or "_attend" in attention_state or "_merge" in attention_state else states


def _scales_channels(scale: nn.Module, states: tuple[_State, ...]) -> bool:
    """Tell whether a layer scale has one factor per channel; it may broadcast others."""
    if type(scale) is not LayerScale:
        return True
    weight, up = scale.__dict__["_parameters"]["weight"], states[4]
    return _is_parameter(weight) and weight.shape == (up["in_features"],)


def _has_known_dropout(states: tuple[_State, ...]) -> bool:
    """Tell whether something survives each dropout, and attention has none; else only the plain path knows how."""
    attention, skip, dropout, mlp_dropout = states[0], states[6], states[7], states[8]
    if dropout["p"] >= 1.0 or mlp_dropout["p"] >= 1.0 or skip["rate"] >= 1.0:
        return False
    return not (attention["dropout"] > 0.0 and attention["training"])


def _shape_of_parts(
    parts: dict[str, Any], states: tuple[_State, ...], device: int | None, dtypes: tuple[torch.dtype, ...] | None
) -> BlockShape | None:
    """Return the sizes of a block; None unless its parameters have them, and the strides, device and dtype that kernels expect."""
    attention, mlp, qkv, out, up, down = states[:6]
    width, hidden, heads, inner = up["in_features"], up["out_features"], attention["heads"], attention["_modules"]
    if device is None and _is_parameter(qkv["_parameters"]["weight"]):
        device = qkv["_parameters"]["weight"].get_device()
    for state, rows, columns in ((qkv, 3 * width, width), (out, width, width), (up, hidden, width), (down, width, hidden)):
        parameters = state["_parameters"]
        weight, bias = parameters["weight"], parameters["bias"]
        if type(weight) is not _Parameter and not _is_parameter(weight):
            return None
        if weight.get_device() != device or weight.shape != (rows, columns):
            return None
        if dtypes is not None and (weight.dtype not in dtypes or (bias is not None and bias.dtype not in dtypes)):
            return None
        if bias is None:
            continue
        if (type(bias) is not _Parameter and not _is_parameter(bias)) or bias.get_device() != device:
            return None
        if bias.shape != (rows,) or not bias.is_contiguous():
            return None
    if width % heads or not _are_affine_norms(parts["norm1"], parts["norm2"], width, device, dtypes):
        return None
    qk_norm = "q_norm" in inner or "k_norm" in inner
    if qk_norm:
        q_norm, k_norm = inner["q_norm"], inner["k_norm"]
        if not is_plain(q_norm, nn.LayerNorm) or not is_plain(k_norm, nn.LayerNorm) or q_norm.eps != k_norm.eps:
            return None
        if not _are_affine_norms(q_norm, k_norm, width // heads, device, dtypes):
            return None
    elif attention["q_norm"] is not None or attention["k_norm"] is not None:
        return None
    approximate = mlp["approximate"]
    if approximate not in _GELUS:  # torch says so, when the module is called
        return None
    return width, hidden, heads, approximate == "tanh", qk_norm


def _are_affine_norms(norm1: Any, norm2: Any, width: int, device: int | None, dtypes: tuple[torch.dtype, ...] | None) -> bool:
    """Tell whether two layer norms are over the last axis, of this width, with weight and bias; folded ones need neither."""
    for norm in (norm1, norm2):
        if type(norm) is FoldedNorm and norm.normalized_shape == (width,):
            continue
        parameters = norm.__dict__["_parameters"]
        weight, bias = parameters["weight"], parameters["bias"]
        if (type(weight) is not _Parameter and not _is_parameter(weight)) or (
            type(bias) is not _Parameter and not _is_parameter(bias)
        ):
            return False
        if device is not None and (weight.get_device() != device or bias.get_device() != device):
            return False
        if dtypes is not None and (weight.dtype not in dtypes or bias.dtype not in dtypes):
            return False
        if weight.numel() != width or bias.numel() != width or not weight.is_contiguous() or not bias.is_contiguous():
            return False
    return True


_Linear, _Dropout, _Parameter = nn.Linear, nn.Dropout, nn.Parameter
_GELUS = ("tanh", "none")
_NORMS = frozenset({nn.LayerNorm, FoldedNorm})
_NO_SCALES, _SCALES = frozenset({nn.Identity}), frozenset({nn.Identity, LayerScale})


def is_plain_tensor(tensor: Any) -> bool:
    """Tell whether a tensor is torch's own (or a fake one, for planning) and not a subclass with arithmetic of its own."""
    if type(tensor) in PLAIN_TENSORS:
        return True
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) is FakeTensor


def is_plain_norm(norm: nn.Module, width: int) -> bool:
    """Tell whether a norm is exactly torch's layer norm over the last axis, with weight and bias that autocast casts."""
    try:
        return is_plain(norm, nn.LayerNorm) and _are_affine_norms(norm, norm, width, None, AUTOCAST_DTYPES)
    except KeyError:  # as in `shape_of_block`
        return False


def holds_plain_tensors(module: nn.Module) -> bool:
    """Tell whether a module's own parameters and buffers are plain tensors."""
    return all(map(is_plain_tensor, _own_tensors(module)))


def _own_tensors(module: nn.Module) -> Iterable[Any]:
    state = module.__dict__
    return (one for own in (state["_parameters"], state["_buffers"]) for one in own.values() if one is not None)


def are_plain_positions(positions: nn.Module) -> bool:
    """Tell whether positions are of one of our kinds and add to tokens what their class says, in a precision that kernels have."""
    if type(positions) not in _POSITIONS or not POSITION_METHODS.isdisjoint(positions.__dict__):
        return False
    return all(is_plain_tensor(one) and one.dtype in AUTOCAST_DTYPES for one in _own_tensors(positions))


def add_only_at_input(positions: Any) -> bool:
    """Tell whether blocks get nothing from the positions: no addition before a block and no bias of its attention."""
    kind, state = type(positions), positions.__dict__
    if not issubclass(kind, Positions) or positions.at != "input" or "bias" in state or "before_layer" in state:
        return False
    return kind.bias is Positions.bias and kind.before_layer is Positions.before_layer


_POSITIONS = frozenset(KINDS.values())


def _is_parameter(parameter: Any) -> bool:
    """Tell whether a parameter is plain, or a shard that FSDP2 puts together before the block runs."""
    if type(parameter) in _SHARDS or is_plain_tensor(parameter):
        return True
    from torch.distributed.tensor import DTensor

    _SHARDS.add(DTensor)  # imported only where there is something that may be one
    return type(parameter) is DTensor


_SHARDS: set[type] = set()


def _is_block(block: nn.Module) -> bool:
    state = block.__dict__
    if "forward" in state or "_add_branches" in state or "_compiled_call_impl" in state or "_call_impl" in state:
        return False
    hooked = state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]
    if hooked and has_hooks(block):
        return False
    # FSDP2 gathers parameters for `forward_pending` only where that is registered with it, which puts it on the instance.
    return type(block) is vitrail.models.vit.Block or (is_sharded(block) and "forward_pending" in state)
