"""How much memory a training step needs, found on fake tensors, which have shapes and no memory.

The model runs forward and backward on fake tensors while every allocation and release is counted, as a GPU's allocator would
do it. Sharded training runs through torch's own engine, over a fake process group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitrail.data.preprocess import preset
from vitrail.models import BiT, BiTConfig, Model, ModelConfig, ViT, ViTConfig
from vitrail.models.lora import add_lora
from vitrail.models.masked import Pretraining
from vitrail.models.recompute import Keep
from vitrail.tasks import Classify, Task
from vitrail.train.config import SELF_SUPERVISED, ModelSpec, OptimSpec, TaskSpec
from vitrail.train.parallel import Runner, World, blocks_of, mesh_of
from vitrail.train.parameter_groups import freeze
from vitrail.train.pretext import pretext, with_defaults

_FAKE_RANKS = 8
_GRAIN = 512  # bytes: the allocator's smallest piece


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device for a step's forward and backward pass."""

    weights: int
    gradients: int
    peak: int
    """The most at any moment, weights and gradients included; optimiser state is not."""

    @property
    def activations(self) -> int:
        """What is not weights or gradients at the peak: activations, and copies of weights in low precision."""
        return self.peak - self.weights - self.gradients


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = _allocated(storage.nbytes())
            self.now += self._alive[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


@dataclass(frozen=True)
class SimulatedModel:
    """A model whose training step is simulated, with the task's parts around it, and with what is frozen."""

    config: ModelConfig
    task: TaskSpec = field(default_factory=TaskSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    spec: ModelSpec = field(default_factory=ModelSpec)
    """What is frozen, and adapters."""

    def build(self) -> tuple[Model, Model | Pretraining, Task]:
        """Return the model, the module that is trained, and the task, on torch's default device."""
        model, trained, task = self._build()
        if self.spec.lora and isinstance(model, ViT):
            add_lora(model, self.spec.lora, matrices=self.spec.lora_on)
        freeze(trained, self.optim, head_only=self.spec.freeze)
        return model, trained, task

    def _build(self) -> tuple[Model, Model | Pretraining, Task]:
        assert isinstance(self.config, ViTConfig | BiTConfig)
        if self.task.kind not in SELF_SUPERVISED:
            model = ViT(self.config) if isinstance(self.config, ViTConfig) else BiT(self.config)
            return model, model, Classify(self.config.outputs)
        assert isinstance(self.config, ViTConfig)
        encoder = ViT(self.config)
        seen = preset("google-vit", size=self.config.image_size, channels=self.config.channels)
        return encoder, *pretext(encoder, with_defaults(self.task), seen)

    def without_memory(self) -> Model | Pretraining:
        with torch.device("meta"):
            return self.build()[1]


def simulate(
    simulated: SimulatedModel,
    micro_batch: int,
    *,
    precision: str,
    recompute: int = 0,
    keep: Keep = "nothing",
    accumulates: bool = False,
) -> Footprint:
    """Simulate one device: plain, or with `accumulates` holding gradients throughout, as DDP and several micro-batches do."""
    with _fake(), Allocations() as memory:
        model, task = _ready(simulated, recompute, keep, fp8=precision == "fp8")
        for _ in range(2 if accumulates else 1):
            _forward_and_backward(model, task, simulated.config, micro_batch, precision)
        peak = memory.peak
    return Footprint(*whole_bytes(simulated), peak)


def simulate_sharded(
    simulated: SimulatedModel,
    micro_batch: int,
    *,
    precision: str,
    ranks: int,
    recompute: int = 0,
    keep: Keep = "nothing",
    keep_gathered: bool = False,
) -> Footprint:
    """Simulate one of many devices under FSDP2, every block a unit. Up to 8 ranks are simulated; beyond, sizes are computed."""
    fake = min(ranks, _FAKE_RANKS)
    world = World(torch.device("cpu"), 0, fake, fake, "fsdp")
    low = torch.bfloat16 if precision in ("bf16", "fp8") else None
    with _fake_group(fake):
        mesh = mesh_of(world)
        with _fake(), Allocations() as memory:
            model, task = _ready(simulated, recompute, keep)
            runner = Runner(model, world, param_dtype=low, mesh=mesh, keep_gathered=keep_gathered)
            memory.peak = memory.now  # the whole model, before it was sharded, does not count
            for _ in range(2):
                _forward_and_backward(runner, task, simulated.config, micro_batch, precision)
            peak = memory.peak
    (weights, gradients), reference = shard_bytes(simulated, ranks), sum(shard_bytes(simulated, fake))
    # All blocks are gathered at a time, or two, the one in use and the next; many ranks pad small tensors up.
    added = sum(_gathered(simulated, ranks, keep_gathered)) - sum(_gathered(simulated, fake, keep_gathered))
    padding = added * (2 if low is not None else 4)
    return Footprint(weights, gradients, peak + weights + gradients - reference + padding)


def whole_bytes(simulated: SimulatedModel) -> tuple[int, int]:
    """Return the bytes of all weights, and of the gradients of those that are trained."""
    sizes = [(_allocated(one.nbytes), one.requires_grad) for one in simulated.without_memory().parameters()]
    return sum(size for size, _ in sizes), sum(size for size, needs_grad in sizes if needs_grad)


def shard_bytes(simulated: SimulatedModel, ranks: int) -> tuple[int, int]:
    """Return the bytes of one rank's shards of float32 weights and gradients; tensors are split along their first axis."""
    sizes = [(4 * _padded(one, ranks) // ranks, one.requires_grad) for one in simulated.without_memory().parameters()]
    return sum(size for size, _ in sizes), sum(size for size, needs_grad in sizes if needs_grad)


def _gathered(simulated: SimulatedModel, ranks: int, keep_gathered: bool) -> list[int]:
    """Return the number of values of the blocks that are gathered at a time, padding included."""
    blocks = blocks_of(simulated.without_memory())
    sizes = [sum(_padded(parameter, ranks) for parameter in block.parameters()) for block in blocks]
    return sizes if keep_gathered else 2 * [max(sizes)]


def _allocated(size: int) -> int:
    """Return the bytes that the allocator uses for so many."""
    return -(-size // _GRAIN) * _GRAIN


def _padded(parameter: Tensor, ranks: int) -> int:
    rows = parameter.shape[0] if parameter.ndim else 1
    return -(-rows // ranks) * ranks * (parameter.numel() // max(rows, 1))


def _ready(simulated: SimulatedModel, recompute: int, keep: Keep, *, fp8: bool = False) -> tuple[nn.Module, Task]:
    with torch.device("cpu"):
        model, trained, task = simulated.build()
    trained.train()
    if fp8 and isinstance(model, ViT):
        model.kernels = "fp8"
    if recompute:
        model.checkpoint_activations(None if recompute < 0 else recompute, keep)
    return trained, task


def _forward_and_backward(run: Callable[..., Any], task: Task, config: ModelConfig, micro_batch: int, precision: str) -> None:
    images = torch.empty(micro_batch, config.channels, *config.image_size)
    labels = torch.zeros(micro_batch, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32"):
        losses = task.objective(run, images, labels)
    losses.sum().backward()


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keep one byte per value for the backward pass, as on a GPU; on a CPU torch keeps four."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


@contextmanager
def _fake() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Replaced as a function, not in the modules: a block with a patched module would not run in fused kernels.
    before, F.dropout = F.dropout, _dropout
    try:
        with FakeTensorMode():
            yield
    finally:
        F.dropout = before


@contextmanager
def _fake_group(ranks: int) -> Iterator[None]:
    """A process group whose messages go nowhere, for engines that ask for one."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
