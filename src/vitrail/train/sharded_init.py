"""Initial values for a model that no rank could hold whole.

The model is built on the meta device, sharded, and given memory for its shards only. Then the ordinary initialisation runs on a
twin: each parameter is drawn whole on the CPU, one after the other and from the same generator as always, and every rank keeps
its slice. So a sharded run starts with exactly the values of an unsharded one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.positions import SinCosPositions
from vitrail.models.resample import sincos_table
from vitrail.train.shards import whole

Initialise = Callable[[Any], None]


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, taken before that model is sharded.

    It is on the CPU, because some of torch's initialisers do nothing on meta tensors, but nothing is ever written into it: so it
    takes addresses and no memory.
    """
    return copy.deepcopy(model).to_empty(device="cpu")


@torch.no_grad()
def fill_shards(model: nn.Module, twin: nn.Module, initialise: Initialise, device: torch.device) -> None:
    """Give a sharded model memory, and the values that `initialise(twin)` draws. All ranks take part."""
    model.to_empty(device=device)
    with _DrawIntoShards(twin, model) as drawing:
        initialise(twin)
    drawing.finish()
    for module in model.modules():  # fixed tables, which no initialisation draws
        if isinstance(module, SinCosPositions):
            module.fill()
        elif isinstance(module, MaskedAutoencoder):
            module.positions.copy_(sincos_table(module.config.grid, module.decoder.width))


class _DrawIntoShards(TorchDispatchMode):
    """Runs operations on a twin's parameters with other tensors in their place, one parameter in memory at a time."""

    def __init__(self, twin: nn.Module, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        shards = dict(model.named_parameters())
        self._shards = {_storage(one): (one, shards[name]) for name, one in twin.named_parameters()}
        self._drawn: set[int] = set()
        self._current: tuple[int, Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = any(self._is_ours(one) for one in tree_leaves((args, kwargs)))
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.arguments)
        if not ours or views:  # a view of the twin's parameter still says which values it is of
            return func(*args, **kwargs)
        result = func(*tree_map(self._real, args), **tree_map(self._real, kwargs))
        return args[0] if func._schema.is_mutable else result

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, Tensor) and _storage(value) in self._shards

    def _real(self, value: Any) -> Any:
        if not self._is_ours(value):
            return value
        return self._full(_storage(value)).as_strided(value.size(), value.stride(), value.storage_offset())

    def _full(self, key: int) -> Tensor:
        if self._current is None or self._current[0] != key:
            self.finish()
            twin, shard = self._shards[key]
            full = whole(shard).cpu() if key in self._drawn else torch.empty(twin.shape, dtype=twin.dtype)
            self._current = key, full
            self._drawn.add(key)
        return self._current[1]

    def finish(self) -> None:
        """Keep this rank's slice of the parameter that was drawn last."""
        if self._current is None:
            return
        shard: Any = self._shards[self._current[0]][1]
        full = self._current[1]
        self._current = None
        if hasattr(shard, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            # src_data_rank=None: every rank has drawn the same values, so none has to send them.
            slices = distribute_tensor(full, shard.device_mesh, shard.placements, src_data_rank=None)
            shard.to_local().copy_(slices.to_local())
        else:
            shard.copy_(full)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
