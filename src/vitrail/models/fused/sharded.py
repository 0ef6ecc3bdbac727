"""What FSDP2 changes about a block that it shards, and what of that is not a change by a user."""

from __future__ import annotations

from typing import Any

from torch import nn

import vitrail.models.vit  # by its name, since that module imports this package

_METHODS = frozenset({"forward", "forward_pending", "_add_branches", "__call__", "_call_impl"})
"""What a user may have patched on the class that FSDP2 has made; on Block itself, `ordinary_call.py` looks."""


def is_sharded(block: nn.Module) -> bool:
    """Tell whether this is a block of which FSDP2 has made its own class, and which has no other change."""
    bases = type(block).__bases__
    if len(bases) != 2 or bases[1] is not vitrail.models.vit.Block or not _METHODS.isdisjoint(vars(type(block))):
        return False
    from torch.distributed.fsdp import FSDPModule

    return bases[0] is FSDPModule


def keep_gathered(block: nn.Module) -> None:
    """Note that FSDP2 keeps the weights of this block from forward to backward, so that what kernels make of them may stay, too."""
    block.__dict__["_stays_gathered"] = True


def stays_gathered(block: nn.Module) -> bool:
    """Tell whether `keep_gathered` noted so; otherwise FSDP2 frees the weights once the block is done."""
    return "_stays_gathered" in block.__dict__


def fsdp_hooks(module: nn.Module) -> set[int]:
    """Return the numbers of the two hooks by which FSDP2 gathers and frees a module's parameters.

    It does the same around `Block.forward_pending`, so they do not count as hooks of a user.
    """
    if not hasattr(module, "_get_fsdp_state"):
        return set()
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    return {handle.id for handle in handles if handle is not None}
