"""Which parameters are trained, and with which learning rate and weight decay.

Parameters are chosen by patterns on their names, as `vitrail train --explain` lists them. A pattern is a glob (`blocks.*.norm1`)
or, after `re:`, a regular expression (`re:blocks\\.(8|9)`). It matches a parameter if it matches its whole name or that of a module
around it: `head` is `head.weight` and `head.bias`. Where several patterns of a setting match, the last one decides:

    optim.freeze            a parameter is frozen, or with `!` before the pattern trained after all
    optim.lr_scale          PATTERN=FACTOR: the learning rate is lr · layer decay · FACTOR
    optim.weight_decay_for  PATTERN=VALUE: the weight decay instead of `weight_decay`, whatever `decay_on` says
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from vitrail.errors import VitrailError, counted, did_you_mean
from vitrail.train.patterns import compile_pattern, split_rule

if TYPE_CHECKING:
    from vitrail.train.config import OptimSpec

_BLOCK = re.compile(r"blocks\.(\d+)\.|stages\.(\d+)\.")
_HEADS = ("head", "distill_head")
_ADAPTER = r".*\.lora_[ab]"


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate and a weight decay."""

    scale: float
    """Learning rate relative to the run's."""
    weight_decay: float
    names: tuple[str, ...]
    values: int
    frozen: bool = False

    @property
    def decays(self) -> bool:
        return self.weight_decay > 0


def frozen_names(names: Sequence[str], patterns: Iterable[str]) -> set[str]:
    """Return the parameters that patterns of `optim.freeze` freeze."""
    frozen: set[str] = set()
    for pattern in patterns:
        matched = matching(pattern.removeprefix("!"), names, "optim.freeze")
        frozen = frozen - matched if pattern.startswith("!") else frozen | matched
    return frozen


def freeze(model: nn.Module, spec: OptimSpec, *, head_only: bool = False) -> None:
    """Freeze parameters: they get no gradient and no optimiser state. What was frozen before stays so.

    With `head_only` everything but the head is frozen first; in a model with LoRA everything but the head and the adapters. A
    batch norm whose own parameters are all frozen uses its running statistics and does not change them.
    """
    parameters = dict(model.named_parameters())
    heads = [f"!{head}" for head in _HEADS if any(name.startswith(f"{head}.") for name in parameters)]
    adapters = [f"!re:{_ADAPTER}"] if any(re.fullmatch(_ADAPTER, name) for name in parameters) else []
    patterns = (*(("*", *heads, *adapters) if head_only or adapters else ()), *spec.freeze)
    for name in frozen_names(list(parameters), patterns):
        parameters[name].requires_grad_(False)
    if not any(one.requires_grad for one in parameters.values()):
        raise VitrailError(
            f"{_written(spec, head_only)} leaves nothing to train: all {len(parameters)} tensors are frozen. "
            "Leave it out, or except some with --optim.freeze '!PATTERN', such as '!head'."
        )
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and own and not any(one.requires_grad for one in own):
            module.eval()


def _written(spec: OptimSpec, head_only: bool) -> str:
    """Return the settings that freeze, as a user gave them."""
    settings = ["model.freeze"] * head_only + [f"optim.freeze {' '.join(spec.freeze)}"] * bool(spec.freeze)
    return " with ".join(settings)


def is_kernel(name: str, parameter: Tensor) -> bool:
    """Whether it is a kernel in the reference's sense: a matrix or convolution, not a bias, norm, token or position table.

    The matrices of LoRA are kernels, too.
    """
    matrix = name.rsplit(".", 1)[-1] == "weight" or re.fullmatch(_ADAPTER, name) is not None
    return parameter.ndim >= 2 and matrix and not name.startswith("positions.")


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Learning rate of each parameter relative to the head's: the head 1, the last block `layer_decay`, and so on down."""
    depth = 1 + max((_block(name) for name, _ in model.named_parameters()), default=-1)

    def height(name: str) -> int:
        if name.startswith(("head.", "distill_head.", "pre_logits.", "pool.", "norm.")):
            return depth + 1
        return _block(name) + 1  # what stands before the first block has none, and comes out as 0

    return {name: layer_decay ** (depth + 1 - height(name)) for name, _ in model.named_parameters()}


def parameter_groups(model: nn.Module, spec: OptimSpec) -> list[Group]:
    """The parameters that are not frozen, grouped; the order is that of their first member."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    every = [name for name, _ in model.named_parameters()]
    layers = layer_scales(model, spec.layer_decay)
    scales = dict.fromkeys(trained, 1.0)
    kernels = {name for name, parameter in trained.items() if spec.decay_on == "all" or is_kernel(name, parameter)}
    decays = {name: spec.weight_decay if name in kernels else 0.0 for name in trained}
    for setting, values in (("optim.lr_scale", scales), ("optim.weight_decay_for", decays)):
        for rule in getattr(spec, setting.removeprefix("optim.")):
            pattern, number = split_rule(rule, setting)
            matched = matching(pattern, every, setting) & trained.keys()
            if not matched:
                raise VitrailError(f"{setting} has {rule!r}, but every parameter that it matches is frozen. Leave it out.")
            values.update(dict.fromkeys(matched, number))
    members: dict[tuple[float, float], list[str]] = {}
    for name in trained:
        members.setdefault((layers[name] * scales[name], decays[name]), []).append(name)
    return [
        Group(scale, decay, tuple(names), sum(trained[name].numel() for name in names)) for (scale, decay), names in members.items()
    ]


def all_groups(model: nn.Module, spec: OptimSpec) -> tuple[Group, ...]:
    """The groups of `parameter_groups`, and the frozen parameters as one more."""
    frozen = {name: one.numel() for name, one in model.named_parameters() if not one.requires_grad}
    last = [Group(0.0, 0.0, tuple(frozen), sum(frozen.values()), frozen=True)] if frozen else []
    return *parameter_groups(model, spec), *last


def matching(pattern: str, names: Sequence[str], setting: str) -> set[str]:
    """Return the parameters that a pattern matches; a pattern that matches none is refused."""
    compiled = compile_pattern(pattern)
    matched = {name for name in names if any(compiled.fullmatch(part) for part in _itself_and_modules(name))}
    if not matched:
        known = dict.fromkeys(part for name in names for part in _itself_and_modules(name))
        raise VitrailError(
            f"{setting} has {pattern!r}, which matches none of the {counted(len(names), 'parameter')}."
            f"{did_you_mean(pattern.removeprefix('re:'), known)} `vitrail train --explain` lists them."
        )
    return matched


def _itself_and_modules(name: str) -> list[str]:
    """`blocks.0.norm1.weight`, `blocks.0.norm1`, `blocks.0`, `blocks`."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _block(name: str) -> int:
    match = _BLOCK.match(name)
    return int(next(number for number in match.groups() if number)) if match else -1


def group_lines(groups: Sequence[Group], spec: OptimSpec) -> list[str]:
    """Describe groups of parameters by weight decay, the frozen ones last, with the range of their learning rates."""
    lines = []
    trained = [group for group in groups if not group.frozen]
    for decay in sorted({group.weight_decay for group in trained}, reverse=True):
        those = [group for group in trained if group.weight_decay == decay]
        rates = sorted({group.scale * spec.lr for group in those})
        rate = f"lr {rates[0]:.3g}" + (f" to {rates[-1]:.3g} in {len(rates)} groups" if len(rates) > 1 else "")
        words = f"weight decay {decay:g} ({spec.decay})" if decay else "no weight decay"
        lines.append(f"{_size(those)}: {rate}, {words}")
    frozen = [group for group in groups if group.frozen]
    return [*lines, f"{_size(frozen)}: frozen"] if frozen else lines


def _size(groups: Sequence[Group]) -> str:
    tensors, values = sum(len(group.names) for group in groups), sum(group.values for group in groups)
    return f"{values:,} parameters in {counted(tensors, 'tensor')}"
