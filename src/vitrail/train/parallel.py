"""One process or many: torch's own data-parallel engines, kept outside the model.

Under `torchrun` every process is a rank with a device of its own; without it there is one rank and none of this is active.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.train.captured_step import on_stream
from vitrail.train.shards import forget_incomplete_step, fsdp_streams

Mode = Literal["single", "ddp", "fsdp", "hybrid"]

GATHERED = 0.1  # of a GPU's memory: FSDP2's blocks stay gathered from forward to backward if all of them take no more than this


@dataclass(frozen=True)
class World:
    """This process among the others."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    local_ranks: int = 1
    mode: Mode = "single"

    @property
    def main(self) -> bool:
        """Whether this rank writes files and prints messages."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        return self.mode in ("fsdp", "hybrid")

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks."""
        if self.ranks > 1:
            dist.all_reduce(value)
        return value

    def any(self, value: bool) -> bool:
        """Whether it is so on any rank; all of them learn it, so all can act alike."""
        if self.ranks == 1:
            return value
        return bool(self.sum(torch.tensor(float(value), device=self.device)).item() > 0)

    def gather(self, value: Any) -> list[Any]:
        """A small object from every rank."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the main rank's value on every rank."""
        if self.ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if self.ranks > 1:
            dist.barrier()

    def raise_rank_error(self, error: RuntimeError, resume: str = "resume from the newest checkpoint") -> None:
        """Raise a sentence if this error says that another rank has ended. `resume` is what the same command would do."""
        lost = isinstance(error, dist.DistError) or re.search(r"gloo|Connection (closed|reset)|Timed out waiting", str(error))
        if self.ranks > 1 and lost:
            raise VitrailError(
                f"Rank {self.rank} of {self.ranks} cannot reach another rank, which has ended or does not answer. If that rank "
                "printed no message, it was killed, most often because its memory was too small. Run the same command again to "
                f"{resume}."
            ) from error


@contextmanager
def joined(device: str = "auto", parallel: str = "auto") -> Iterator[World]:
    """The world this process belongs to; a process group lives as long as the block."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = choose_device(device, here)
    if ranks == 1 and "RANK" not in os.environ:
        with torch.cuda.device(chosen) if chosen.type == "cuda" else nullcontext():  # --device cuda:1 is not the current one
            yield World(chosen)
        return
    started = not dist.is_initialized()
    if started:
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        # Small objects and checkpoints use gloo on the CPU, gradients NCCL.
        dist.init_process_group("cuda:nccl,cpu:gloo" if chosen.type == "cuda" else "gloo")
    mode: Mode = "ddp" if parallel == "auto" else parallel  # type: ignore[assignment]
    try:
        yield World(chosen, dist.get_rank(), ranks, int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))), mode)
    finally:
        if started:
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device: `auto` is this rank's GPU, else Apple's, else the CPU."""
    if name != "auto":
        device = _device_named(name)
        return torch.device("cuda", local_rank) if name == "cuda" else device
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _device_named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise VitrailError(f"There is no device {name!r}. Use auto, cpu, cuda, cuda:1 or mps.") from error
    if device.type == "cpu":
        return device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise VitrailError(f"--device {name}: torch finds no GPU. `vitrail doctor` shows more; or use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= (gpus := torch.cuda.device_count()):
        raise VitrailError(f"--device {name}: the last GPU here is cuda:{gpus - 1}. `vitrail doctor` lists them.")
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != device.type:
        raise VitrailError(f"--device {name}: torch finds no such device here. `vitrail doctor` lists those it finds.")
    return device


class Forward(nn.Module):
    """The calls training makes on a model, behind one `forward`, where DDP and FSDP2 have their hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, heads: int = 1) -> Any:
        return self.model.distilled_logits(*inputs) if heads == 2 else self.model(*inputs)  # type: ignore[operator]


class Runner:
    """A model as training runs it: `runner(images)`, or with whatever else it takes; it stays as it is, with its own names."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        param_dtype: torch.dtype | None = None,
        mesh: Any = None,
        keep_gathered: bool | None = None,
    ) -> None:
        self.model, self.world = model, world
        self.stream: torch.cuda.Stream | None = None
        """Where forward and backward run under DDP on a GPU: its hooks belong to the stream on which it was built, and a CUDA
        graph cannot be captured on the default one."""
        self._forward: nn.Module = Forward(model)
        self._units: list[Any] = []
        """What FSDP2 gathers as one."""
        self.keeps_gathered = False
        """Whether FSDP2's blocks stay gathered from forward to backward."""
        self._sums_gradients = True
        if world.sharded:
            if keep_gathered is None:
                memory = torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else 0
                keep_gathered = fits_gathered(model, param_dtype, memory)
            self.keeps_gathered = keep_gathered
            self._units = _shard(model, mesh or mesh_of(world), param_dtype, keep_gathered)
        elif world.mode == "ddp":
            self.stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
            self.renew()

    def renew(self) -> None:
        """Make the engine ready for a new step after an incomplete one, on all ranks.

        DDP wraps the model again, since it would wait for the rest of its gradients; FSDP2 forgets what it waits for.
        """
        if self.world.sharded:
            forget_incomplete_step(self.model)
        if self.world.mode != "ddp":
            return
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        with on_stream(self.stream):
            self._forward = nn.parallel.DistributedDataParallel(Forward(self.model), device_ids=ids, gradient_as_bucket_view=True)

    def __call__(self, *inputs: Tensor, heads: int = 1) -> Any:
        return self._forward(*inputs, heads=heads)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Wrap each micro-batch: gradients are reduced over ranks only with the last one of a step."""
        if self.world.sharded and last != self._sums_gradients:  # it walks over all modules
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            self._sums_gradients = last
        elif isinstance(self._forward, nn.parallel.DistributedDataParallel) and not last:
            return self._forward.no_sync()
        return nullcontext()

    def join_streams(self) -> None:
        """Let the current stream wait for FSDP2's own. During a capture they belong to it, and no graph may end before they do."""
        if not self.world.sharded or self.world.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.world.device)
        for stream in fsdp_streams(self.model):
            stream.wait_stream(current)  # only a stream that takes part in the capture can be waited for
            current.wait_stream(stream)

    def reshard(self) -> None:
        """Free gathered weights. After a forward pass without a backward pass FSDP2 keeps some, and would use them again even if
        the shards have changed since."""
        for unit in self._units:
            unit.reshard()


def mesh_of(world: World) -> Any:
    """The ranks as shards; `hybrid` shards within a machine and copies across machines."""
    from torch.distributed.device_mesh import init_device_mesh

    if world.mode != "hybrid":
        return init_device_mesh(world.device.type, (world.ranks,), mesh_dim_names=("shards",))
    if world.ranks % world.local_ranks:
        raise VitrailError(
            f"Hybrid sharding needs the same number of ranks on each machine, but there are {world.ranks} ranks, "
            f"{world.local_ranks} of them on this machine. Start as many on each, or use --parallel fsdp."
        )
    shape = (world.ranks // world.local_ranks, world.local_ranks)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("copies", "shards"))


def fits_gathered(model: nn.Module, param_dtype: torch.dtype | None, memory: int) -> bool:
    """Whether a model's blocks may stay gathered on devices with so many bytes: then backward needs no all-gather."""
    values = sum(parameter.numel() for block in blocks_of(model) for parameter in block.parameters())
    return values * (param_dtype or torch.float32).itemsize <= GATHERED * memory


def _shard(model: nn.Module, mesh: Any, param_dtype: torch.dtype | None, keep_gathered: bool) -> list[Any]:
    """FSDP2: every block is a unit, the rest the root. Returns the units."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    from vitrail.models.fused import sharded

    # Blocks travel and compute in low precision, gradients are summed in float32. The root stays in float32: through the
    # position table it decides the precision of the residual stream, which is so the same as without sharding.
    inner = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks_of(model):
        policy = inner if param_dtype is not None else MixedPrecisionPolicy()
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_gathered, mp_policy=policy)
        if keep_gathered:
            sharded.keep_gathered(block)
        if hasattr(block, "forward_pending"):  # the fused path enters a block here, so here too its weights are gathered
            register_fsdp_forward_method(block, "forward_pending")
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    if hasattr(model, "distilled_logits"):
        register_fsdp_forward_method(model, "distilled_logits")
    return [*blocks_of(model), model]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: encoder blocks, or a ResNet's units."""
    blocks = list(getattr(model, "blocks", ()))
    for stage in getattr(model, "stages", ()):
        blocks += list(stage)
    return blocks
