"""What a copy for inference may replace, and whether a model runs any code but torch's and ours.

Stricter than the whitelist, which is checked at every call: these checks run when a copy is made, and may take longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from vitrail.models.attention import Attention, AxialAttention
from vitrail.models.fused.ordinary_call import is_ordinary_call
from vitrail.models.fused.whitelist import has_hooks, is_plain, is_plain_block
from vitrail.models.layers import LayerScale, Mlp, StochasticDepth
from vitrail.models.vit import Block, ViT

_PARTS = (Block, Attention, AxialAttention, Mlp, LayerScale, StochasticDepth, nn.LayerNorm, nn.Linear, nn.Dropout, nn.Identity)


def is_replaceable(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Tell whether a module is exactly a `kind`: no subclass, no hooks, no method patched, no parameter of another class."""
    if module is None or not is_plain(module, kind) or _has_patched_methods(module):
        return False
    tensors = [tensor for tensor in module._parameters.values() if tensor is not None]
    return all(type(tensor) is nn.Parameter for tensor in tensors) and hasattr(module, "weight") == ("weight" in module._parameters)


def replaceable_blocks(model: nn.Module) -> list[Block]:
    """Return the plain blocks, which can be packed or have their norms folded. None of a subclass of ViT, which may use them."""
    if not _is_plain_vit(model):
        return []
    return [block for block in model.blocks if _is_plain(block) and not any(map(_has_patched_methods, block.modules()))]  # type: ignore[union-attr]


def blocks_of_known_parts(model: nn.Module) -> list[Block]:
    """Return blocks that are not plain but made of our parts alone (axial attention, norms without a bias).

    Their linear layers can be replaced one by one.
    """
    if not _is_plain_vit(model):
        return []
    return [block for block in model.blocks if _is_of_known_parts(block) and not _is_plain(block)]  # type: ignore[union-attr]


def runs_known_code(model: nn.Module) -> bool:
    """Tell whether every module is torch's or ours, with its own methods and without hooks.

    Only then may calls be split over threads, or replayed from a CUDA graph: a user's code is called once per call of the model,
    with the whole batch.
    """
    modules = list(model.modules())
    return is_ordinary_call() and all(map(_is_known, modules)) and not are_patched(set(map(type, modules)))


def are_patched(kinds: Iterable[Any]) -> bool:
    """Tell whether a method of a class is not the one it was when this was first asked. Not only of whitelisted classes."""
    return any(getattr(kind, name, None) is not method for kind in kinds for name, method in _own_methods(kind))


@cache
def _own_methods(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the functions that a class has besides those of every module, and what a call of a module runs."""
    bases = (vars(base) for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)
    names = {name for names in bases for name, value in names.items() if isinstance(value, FunctionType)}
    return tuple((name, getattr(kind, name)) for name in sorted(names | {"__call__", "_call_impl"}))


def _is_known(module: nn.Module) -> bool:
    kind: Any = type(module)
    return _is_known_class(kind) and not has_hooks(module) and not _has_patched_methods(module)


@cache
def _is_known_class(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "vitrail")


def _has_patched_methods(module: nn.Module) -> bool:
    """Tell whether an attribute of the instance hides a method of its class, as after `mlp.forward = …` or `mlp.compile()`."""
    kind: Any = type(module)
    return not _methods(kind).isdisjoint(vars(module))


@cache
def _methods(kind: Any) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name))) | {"_compiled_call_impl"}


def _is_plain_vit(model: nn.Module) -> bool:
    return is_ordinary_call() and type(model) is ViT and not _has_patched_methods(model) and is_plain(model.blocks, nn.ModuleList)


def _is_plain(block: nn.Module) -> bool:
    if not is_plain_block(block, layer_scale=True, eval_mode=True):
        return False
    return type(block.norm1) is nn.LayerNorm and type(block.norm2) is nn.LayerNorm  # not folded already


def _is_of_known_parts(block: nn.Module) -> bool:
    if not all(type(part) in _PARTS and is_replaceable(part, type(part)) for part in block.modules()):
        return False
    if type(block) is not Block or type(block.attention) not in (Attention, AxialAttention) or type(block.mlp) is not Mlp:
        return False
    # A packed layer may overwrite its input; after an Identity that would be the residual stream.
    return type(block.norm1) is nn.LayerNorm and type(block.norm2) is nn.LayerNorm
