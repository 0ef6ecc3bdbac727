"""Optimisers, and what weight decay means to them.

Papers and code bases mean different things by "weight decay 0.1". With s(t) the schedule from 0 to 1, lr the peak learning
rate and u the optimiser's own direction, a parameter p moves by

    scaled-by-lr        −s·lr·(u + wd·p)        the paper's tables, torch's AdamW
    independent-of-lr   −s·(lr·u + wd·p)        big_vision's configurations: its 1e-4 at lr 1e-3 is 0.1 above
    coupled             wd·p joins the gradient before the optimiser sees it: torch's SGD and Adam
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.train.config import Decay, OptimSpec
from vitrail.train.parameter_groups import Group, parameter_groups
from vitrail.train.shards import local, sharded_like


def convert_decay(weight_decay: float, lr: float, source: Decay, target: Decay) -> float:
    """Convert a decay to another convention; `coupled` has no equivalent under Adam."""
    if source == target:
        return weight_decay
    if "coupled" in (source, target):
        raise ValueError("coupled decay goes through the optimiser's own scaling and has no equivalent")
    return weight_decay * lr if target == "independent-of-lr" else weight_decay / lr


class Optimizer:
    """One of torch's optimisers under a schedule, with the weight decay's convention made explicit.

    Its state exists from the start, so that a checkpoint has the same shape at every step. Under FSDP2 torch's optimiser gets
    this rank's shards as ordinary tensors: operations on DTensors cost the host more than the update itself.
    """

    def __init__(self, model: nn.Module, spec: OptimSpec) -> None:
        self.spec = spec
        self.groups = parameter_groups(model, spec)
        parameters = dict(model.named_parameters())
        self.names = [name for group in self.groups for name in group.names]
        self.parameters = [parameters[name] for name in self.names]
        self._shards = _Shards(self.parameters) if hasattr(self.parameters[0], "device_mesh") else None
        self._updated: list[Tensor] = self._shards.tensors if self._shards is not None else list(self.parameters)
        """What torch's optimiser updates."""
        updated = dict(zip(self.names, self._updated, strict=True))
        self._inner = _build(spec, [self._settings(group, updated) for group in self.groups])
        self._fill_state()

    def _settings(self, group: Group, updated: dict[str, Tensor]) -> dict[str, Any]:
        spec, decay = self.spec, group.weight_decay
        if spec.decay == "independent-of-lr":
            decay /= spec.lr * group.scale  # torch multiplies it by this group's own learning rate again
        return {"params": [updated[name] for name in group.names], "scale": group.scale, "weight_decay": decay}

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self._inner

    def set_rate(self, factor: float) -> None:
        """Set the learning rates by the schedule's factor, from 0 to 1."""
        for group in self._inner.param_groups:
            group["lr"] = self.spec.lr * group["scale"] * factor

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of all gradients, on every rank. The host does not wait for it."""
        norm = torch.nn.utils.get_total_norm([local(one.grad) for one in self.parameters if one.grad is not None])
        return norm if self._shards is None else self._shards.total_norm(norm)

    @torch.no_grad()
    def step(self, skip: Tensor | None = None, norm: Tensor | None = None) -> None:
        """Move the parameters. Where `skip` (a number on their device) is 1 nothing moves; the host does not wait for it.

        With clipping, `norm` is that of all gradients. They are scaled down on the way through the update, not in a pass before.
        """
        if self._shards is not None:
            self._shards.take_gradients()
        scale = None if norm is None or self.spec.clip is None else ((norm + 1e-6) / self.spec.clip).clamp(min=1.0)
        # The fused kernels read both numbers on the device.
        self._inner.grad_scale, self._inner.found_inf = scale, skip  # type: ignore[attr-defined]
        if self.spec.name == "sgd" and self.spec.decay != "coupled":
            self._decay(skip)
        self._inner.step()
        self._inner.grad_scale = self._inner.found_inf = None  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        for one in (*self.parameters, *self._updated):
            one.grad = None

    @torch.no_grad()
    def _decay(self, skip: Tensor | None) -> None:
        """Decoupled decay for SGD, which torch does not have."""
        for group in self._inner.param_groups:
            amount = group["lr"] * group["decoupled"]
            if amount:
                kept = 1 - amount if skip is None else 1 - amount * (1 - skip)
                torch._foreach_mul_(group["params"], kept)

    def _fill_state(self) -> None:
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                if self.spec.name == "sgd":
                    state = {"momentum_buffer": torch.zeros_like(parameter)} if self.spec.momentum else {}
                else:
                    state = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
                self._inner.state[parameter] = state

    def tensors(self) -> dict[str, Tensor]:
        """The state by parameter name, to be saved or written into; sharded like the parameters."""
        tensors: dict[str, Tensor] = {}
        for name, parameter, updated in zip(self.names, self.parameters, self._updated, strict=True):
            for key, value in self._inner.state[updated].items():
                tensors[f"{name}.{key}"] = value if key == "step" else sharded_like(parameter, value)
        return tensors


class _Shards:
    """This rank's shards of FSDP2's parameters, as ordinary tensors that share their memory."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters: list[Any] = list(parameters)
        self._local = [local(one) for one in parameters]
        self.tensors = [one.detach() for one in self._local]
        mesh, placements = self._parameters[0].device_mesh, self._parameters[0].placements
        if any(getattr(one, "placements", None) != placements for one in parameters):
            raise ValueError("some parameters are sharded in another way than others")
        # With hybrid sharding, ranks along the other axis of the mesh hold copies: their gradients must not count twice.
        self._groups = [mesh.get_group(axis) for axis, one in enumerate(placements) if one.is_shard() and mesh.size(axis) > 1]

    def take_gradients(self) -> None:
        """Give each tensor the gradient of its shard."""
        for number, parameter in enumerate(self._parameters):
            shard, tensor = local(parameter), self.tensors[number]
            if shard is not self._local[number]:  # FSDP2 has moved it, as it may before the first forward pass
                tensor.data, self._local[number] = shard, shard
            tensor.grad = None if parameter.grad is None else local(parameter.grad)

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm over all shards, from that of this rank's."""
        for group in self._groups:
            norm = norm.square()
            dist.all_reduce(norm, group=group)
            norm = norm.sqrt()
        return norm


def _build(spec: OptimSpec, settings: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if spec.name == "sgd":
        for group in settings:
            group["decoupled"] = group["weight_decay"]
            if spec.decay != "coupled":
                group["weight_decay"] = 0.0
        return torch.optim.SGD(settings, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, fused=True)
    kind = torch.optim.Adam if spec.decay == "coupled" else torch.optim.AdamW
    return kind(settings, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)


def explain(spec: OptimSpec) -> str:
    """The update in one line, with this recipe's numbers."""
    direction = {
        "sgd": f"momentum {spec.momentum:g} of the gradient",
        "adam": f"Adam's direction (β {spec.beta1:g}, {spec.beta2:g})",
        "adamw": f"Adam's direction (β {spec.beta1:g}, {spec.beta2:g})",
    }[spec.name]
    if not spec.weight_decay:
        decay = "weight decay by optim.weight_decay_for alone" if spec.weight_decay_for else "no weight decay"
        return f"p −= s·{spec.lr:g}·u, u = {direction}; {decay}"
    if spec.decay == "coupled":
        return f"p −= s·{spec.lr:g}·u, u = {direction}, to which {spec.weight_decay:g}·p was added (coupled decay)"
    if spec.decay == "scaled-by-lr":
        same = convert_decay(spec.weight_decay, spec.lr, "scaled-by-lr", "independent-of-lr")
        return (
            f"p −= s·{spec.lr:g}·(u + {spec.weight_decay:g}·p), u = {direction}; "
            f"decay scaled by lr, as torch's AdamW (in big_vision's convention {same:g})"
        )
    same = convert_decay(spec.weight_decay, spec.lr, "independent-of-lr", "scaled-by-lr")
    return (
        f"p −= s·({spec.lr:g}·u + {spec.weight_decay:g}·p), u = {direction}; "
        f"decay independent of lr, as big_vision (in torch's AdamW {same:g})"
    )
