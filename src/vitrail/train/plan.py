"""What a recipe needs on GPUs that you do not have: memory and communication per GPU, for each engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from vitrail.errors import VitrailError, counted
from vitrail.models import ModelConfig, ViTConfig, model_config
from vitrail.models.masked import Pretraining
from vitrail.train.config import CHANGEABLE, SELF_SUPERVISED, ModelSpec, Recipe
from vitrail.train.lengths import describe_length
from vitrail.train.memory import Footprint, SimulatedModel, shard_bytes, simulate, simulate_sharded, whole_bytes
from vitrail.train.parallel import blocks_of, fits_gathered
from vitrail.train.parameter_groups import Group, all_groups
from vitrail.train.schedules import describe_schedule, in_steps
from vitrail.train.speed import training_flops

GIB = 2**30
# Held by every process besides tensors: the driver's context and kernels (measured about 0.5 GiB), cuBLAS workspaces.
_CONTEXT = GIB // 2
_WORKSPACE = 32 * 2**20
_FRAGMENTS = 0.05  # fraction lost to fragmentation in the allocator


@dataclass(frozen=True)
class Need:
    """What one GPU needs under one engine, in bytes."""

    engine: str
    micro_batch: int
    largest_micro_batch: int
    accumulation: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    communication: int
    """Bytes each GPU sends in an optimiser step."""

    @property
    def tensors(self) -> int:
        """Peak of tensors: what `torch.cuda.max_memory_allocated` reports."""
        return self.weights + self.gradients + self.optimizer + self.average + self.activations + _WORKSPACE

    @property
    def total(self) -> int:
        """Memory that the GPU must have."""
        return math.ceil(self.tensors * (1 + _FRAGMENTS)) + _CONTEXT


@dataclass(frozen=True)
class Plan:
    """A recipe on a number of GPUs."""

    model: str
    parameters: int
    image_size: tuple[int, int]
    batch: int
    gpus: int
    memory: int
    precision: str
    flops: int
    """FLOPs of an optimiser step, over all GPUs."""
    schedule: str
    """The learning rate schedule in words; in steps as far as they follow without the data."""
    groups: tuple[Group, ...]
    """Parameters by learning rate and weight decay; frozen ones last."""
    needs: tuple[Need, ...]


def make_plan(
    recipe: Recipe,
    *,
    gpus: int,
    memory: float,
    outputs: int = 1000,
    micro_batch: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan for DDP and FSDP2 (one GPU: without either). `micro_batch` None takes the largest that fits and is needed.

    `say` is told the result of each simulated step: for the largest models one takes many seconds.
    """
    if not 1 <= gpus <= 4096:
        raise VitrailError(f"--gpus is {gpus}; plans are made for 1 to 4096.")
    if gpus > recipe.batch:
        raise VitrailError(
            f"A batch of {recipe.batch} cannot be split over {gpus} GPUs; each needs at least one image. Use fewer --gpus or a "
            "larger --batch."
        )
    self_supervised = recipe.task.kind in SELF_SUPERVISED
    config = config_of(recipe.model, 0 if self_supervised else outputs)
    if self_supervised and not isinstance(config, ViTConfig):
        raise VitrailError(
            f"{config.name} is a ResNet without patches; {recipe.task.kind} needs a Vision Transformer, such as "
            "--model.name ViT-B/16."
        )
    simulated = SimulatedModel(config, recipe.task, recipe.optim, recipe.model)
    trained = simulated.without_memory()
    precision = "bf16" if recipe.precision == "auto" else recipe.precision
    engines = ("single",) if gpus == 1 else ("ddp", "fsdp")
    needs = tuple(_need(recipe, simulated, engine, gpus, round(memory * GIB), precision, micro_batch, say) for engine in engines)
    return Plan(
        config.name,
        sum(one.numel() for one in trained.parameters()),
        config.image_size,
        recipe.batch,
        gpus,
        round(memory * GIB),
        precision,
        (3 * trained.flops() if isinstance(trained, Pretraining) else training_flops(config)) * recipe.batch,
        _schedule(recipe),
        all_groups(trained, recipe.optim),
        needs,
    )


def _schedule(recipe: Recipe) -> str:
    spec, total = recipe.schedule, recipe.steps
    in_epochs = any(str(length).endswith("ep") for length in (spec.warmup, spec.cooldown))
    resolved = None if total is None or in_epochs else in_steps(spec, total, 0)
    over = describe_length(f"{recipe.epochs or 0:g}ep") if total is None else counted(total, "step")
    return describe_schedule(spec, over, resolved)


def config_of(spec: ModelSpec, outputs: int) -> ModelConfig:
    """Return the model a recipe will build, without its data or its weights."""
    if spec.start is not None:
        from vitrail.checkpoints import load

        config, changes = load(spec.start, verify="none").model.config, spec.config_changes()
        kept = (*CHANGEABLE, "channels", *(("pre_logits",) if isinstance(config, ViTConfig) else ()))
        size = config.image_size if spec.image_size is None else spec.image_size
        return config.replace(outputs=outputs, image_size=size, **{name: changes[name] for name in kept if name in changes})
    size = 224 if spec.image_size is None else spec.image_size
    return model_config(spec.name, outputs=outputs, image_size=size, **spec.config_changes())


def _need(
    recipe: Recipe,
    simulated: SimulatedModel,
    engine: str,
    gpus: int,
    memory: int,
    precision: str,
    micro_batch: int | None,
    say: Callable[[str], None],
) -> Need:
    per_gpu = math.ceil(recipe.batch / gpus)
    low = None if precision == "fp32" else torch.bfloat16
    keep_gathered = engine == "fsdp" and fits_gathered(simulated.without_memory(), low, memory)

    @cache
    def footprint(size: int, accumulates: bool = True) -> Footprint:
        settings: dict[str, Any] = {"recompute": recipe.model.recompute, "keep": recipe.model.recompute_keep}
        if engine == "fsdp":
            found = simulate_sharded(simulated, size, precision=precision, ranks=gpus, keep_gathered=keep_gathered, **settings)
        else:
            found = simulate(simulated, size, precision=precision, accumulates=accumulates or engine == "ddp", **settings)
        say(f"{engine}, {counted(size, 'image')} at once: {found.peak / GIB:.1f} GiB without optimiser state")
        return found

    _, gradients = shard_bytes(simulated, gpus) if engine == "fsdp" else whole_bytes(simulated)
    states = _states(recipe, gradients)
    largest = _largest(footprint, (memory - _CONTEXT) / (1 + _FRAGMENTS) - _WORKSPACE - sum(states))
    chosen = min(micro_batch or largest, per_gpu)
    if chosen and micro_batch is None:
        chosen = math.ceil(per_gpu / math.ceil(per_gpu / chosen))  # no larger than as many accumulation steps need
    # Where nothing fits, show the need of one image.
    exact = footprint(chosen, accumulates=chosen < per_gpu) if chosen else footprint(1)
    accumulation = math.ceil(per_gpu / chosen) if chosen else 0
    return Need(
        engine,
        chosen,
        largest,
        accumulation,
        exact.weights,
        exact.gradients,
        *states,
        exact.activations,
        communication(simulated, engine, gpus, accumulation, precision, keep_gathered=keep_gathered),
    )


def _largest(footprint: Callable[[int], Footprint], available: float) -> int:
    """Return the most images whose step fits into `available` bytes. Memory is nearly linear in them: a few guesses are enough."""
    low, high = (8, footprint(8).peak), (16, footprint(16).peak)
    for _ in range(5):
        guess = math.floor(low[0] + (available - low[1]) * (high[0] - low[0]) / max(high[1] - low[1], 1))
        if guess < 1:
            return 0
        peak = footprint(guess).peak
        if peak <= available:
            return guess
        high = (guess, peak)
        low = low if low[0] < guess else (1, footprint(1).peak)
    return low[0] if low[1] <= available else 0


def _states(recipe: Recipe, trained: int) -> tuple[int, int]:
    """Return the bytes of optimiser state and averaged weights for so many bytes of weights that are not frozen."""
    moments = (1 if recipe.optim.momentum else 0) if recipe.optim.name == "sgd" else 2
    return moments * trained, trained if recipe.ema else 0


def communication(
    simulated: SimulatedModel, engine: str, gpus: int, accumulation: int, precision: str, *, keep_gathered: bool = False
) -> int:
    """Return the bytes each GPU sends in a step, by ring algorithms.

    DDP sums float32 gradients once. FSDP2 gathers every block for the forward and, unless it stays gathered, again for the
    backward pass of each micro-batch, in the precision of the matmuls, the rest once in float32, and scatters float32 gradients
    once. Frozen weights have no gradients.
    """
    trained, ring = simulated.without_memory(), (gpus - 1) / gpus
    total = sum(parameter.numel() for parameter in trained.parameters())
    gradients = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    if engine == "single":
        return 0
    if engine == "ddp":
        return round(2 * ring * 4 * gradients)
    inner = sum(parameter.numel() for block in blocks_of(trained) for parameter in block.parameters())
    gathered = (1 if keep_gathered else 2) * inner * (4 if precision == "fp32" else 2) + 4 * (total - inner)
    return round(ring * (max(accumulation, 1) * gathered + 4 * gradients))
