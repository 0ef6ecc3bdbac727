"""Tensors of which FSDP2 gives this rank a shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards; for one that has none, the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, sharing its memory; for one that is not sharded, the tensor itself."""
    # Not to_local(), which wraps it anew where gradients are on, and costs more.
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def sharded_like(tensor: Any, shard: Tensor) -> Tensor:
    """A shard of this rank as part of a tensor that is sharded like `tensor`; if that is not sharded, the shard itself."""
    if not hasattr(tensor, "device_mesh"):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def fsdp_streams(model: Any) -> list[Any]:
    """Return the CUDA streams on which FSDP2 gathers weights and sums gradients; none before the first forward pass."""
    context = model._get_fsdp_state()._comm_ctx
    return [value for name, value in vars(context).items() if name.endswith("_stream")]


def forget_incomplete_step(model: Any) -> None:
    """Bring FSDP2 back to its state between two steps, without waiting for events of the step that failed.

    After a failed capture nothing can wait for them. Newer torch has `reset_iter_state` for the rest.
    """
    root = model._get_fsdp_state()
    shared, communication = root._state_ctx, root._comm_ctx
    groups = [one for state in shared.all_states for one in _groups(state)]
    communication.all_gather_state = communication.reduce_scatter_state = None
    communication.reduce_scatter_states = []
    communication._last_post_reduce_events = {}
    for group in groups:
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
    communication.post_forward_order.clear()
    for state in (*shared.all_states, *groups):
        state._training_state = type(state._training_state).IDLE
    for group in groups:
        group._post_forward_indices.clear()
        group._partial_reduce_output = None
        for one in group.fsdp_params:
            one.sharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(one):
                one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
        group._to_sharded()


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of one of FSDP2's states: in newer torch there may be several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
