"""Build the models under test: each does the same work on the same images.

Training is forward, cross-entropy, backward and fused AdamW, with the optimizer and the autocast of `vitrail train` for all
libraries; inference is the forward pass. Only the model and its mode differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.bench import baselines
from vitrail.bench.plan import OURS, Metric, Task
from vitrail.data.batch import Batch
from vitrail.models import ModelConfig, build_model, parameters
from vitrail.tasks import Classify
from vitrail.train.config import OptimSpec, Recipe, ScheduleSpec
from vitrail.train.fp8 import use_fp8
from vitrail.train.optimizers import Optimizer
from vitrail.train.parallel import Runner, World
from vitrail.train.precision import autocast
from vitrail.train.step import Step

# The learning rate is small, so that the model does not memorise the random labels and gradients stay realistic.
OPTIM = OptimSpec(name="adamw", lr=1e-5, weight_decay=0.1, clip=None)
_COMPILE = {"compiled": None, "graphs": "reduce-overhead"}


@dataclass(frozen=True)
class Case:
    """One thing to measure: a model, a task, a metric, a library and its mode."""

    config: ModelConfig
    task: Task
    metric: Metric
    library: str
    mode: str
    batch: int
    precision: str
    device: torch.device
    clip: float | None = None

    def __str__(self) -> str:
        return f"{self.config.name} {self.task}, {self.library} {self.mode}"

    @property
    def casts_weights(self) -> bool:
        """Whether the weights themselves are bf16, so that autocast is not needed."""
        return self.mode.endswith("-bf16") and not self.fast

    @property
    def captures(self) -> bool:
        """Whether the first steps are captured as a CUDA graph."""
        return self.mode.startswith(("loop", "graphs"))

    @property
    def fast(self) -> bool:
        """Whether it is the copy made by `for_inference`."""
        return self.mode.split("-")[0] == "fast"


class Inputs:
    """A batch of random images and labels on the device, shared by all models under test."""

    def __init__(self, config: ModelConfig, batch: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        size = (batch, config.channels, *config.image_size)
        self.images = torch.randn(size, device=device, generator=generator)
        self.targets = torch.randint(config.outputs, (batch,), device=device, generator=generator)

    @cached_property
    def bf16(self) -> Tensor:
        return self.images.bfloat16()

    def for_case(self, case: Case) -> Tensor:
        return self.bf16 if case.casts_weights else self.images


@dataclass
class Workload:
    """A model under test, ready to run steps. Deleting it frees its memory."""

    step: Callable[[], Tensor]
    """Run one step and return its loss or its outputs."""
    parameters: int
    is_finite: Callable[[Tensor], bool] = field(default=lambda result: bool(result.isfinite().all()))
    """Return whether all numbers were finite, given what the last step returned."""
    note: Callable[[], str] = lambda: ""
    """Return what a reader should know about how it ran."""


@contextmanager
def many_compilations() -> Iterator[None]:
    """Allow many compilations in one process. After eight, torch would run the rest eagerly with little warning."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
        yield


def build_workload(case: Case, inputs: Inputs) -> Workload:
    """Build the model and its step. Compilation happens later, in the first step."""
    torch.manual_seed(0)
    model = _model(case)
    count = sum(one.numel() for one in model.parameters())
    if case.task == "infer":
        note = _inference_note(case, model)
        return Workload(_inference(case, model, inputs), count, note=lambda: note)
    if case.mode.startswith("loop"):
        return _train_loop_step(case, model, inputs, count)
    return Workload(_training(case, model, inputs), count)


def parameter_note(case: Case, workload: Workload) -> str:
    """Return a note if the number of parameters differs from ours. Inference copies are exempt: they repack weights."""
    ours = parameters(case.config)
    if workload.parameters == ours or case.fast:
        return ""
    return f"{workload.parameters:,} parameters, ours has {ours:,}"


def _model(case: Case) -> nn.Module:
    if case.library == OURS:
        model: nn.Module = build_model(case.config, device=case.device)
        if not case.mode.startswith(("default", "loop", "fast")) and hasattr(model, "kernels"):
            model.kernels = "plain"  # type: ignore[assignment]
        if case.mode == "loop-fp8":
            use_fp8(model, Recipe(), World(case.device))
        if case.mode.startswith("loop-recompute"):
            model.checkpoint_activations(keep="matmuls" if case.mode.endswith("matmuls") else "nothing")  # type: ignore[operator]
    else:
        with case.device:
            model = baselines.build(case.library, case.config)
        model.to(case.device)
    _fill_head(model, case.config.outputs)
    model.train(case.task == "train")
    if case.casts_weights:
        model.to(torch.bfloat16)
    if case.fast:
        model = _for_inference(case, model)
    base = case.mode.removesuffix("-bf16")
    if base in _COMPILE:
        model.compile(mode=_COMPILE[base], dynamic=False)
    return model


def _fill_head(model: nn.Module, outputs: int) -> None:
    """Randomise a zero-initialised head: multiplying zeros draws less power, so steps would be faster than in real training."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == outputs][-1]
    nn.init.trunc_normal_(head.weight, std=0.02)


def _for_inference(case: Case, model: Any) -> nn.Module:
    from vitrail.models.inference import for_inference

    return for_inference(model, precision=_fast_precision(case), device=case.device)


def _inference_note(case: Case, model: Any) -> str:
    """Return the precision an inference copy computes in, and why: it can differ from the other models'."""
    if not case.fast:
        return ""
    from vitrail.models.inference import choose

    chosen = choose(model.config, _fast_precision(case), case.device)
    return f"computes in {chosen.precision}: {chosen.why}"


def _fast_precision(case: Case) -> Any:
    return case.mode.partition("-")[2] or "auto"


def _inference(case: Case, model: nn.Module, inputs: Inputs) -> Callable[[], Tensor]:
    images, begin = inputs.for_case(case), _step_marker(case)
    own_precision = case.casts_weights or case.fast  # no autocast needed

    def step() -> Tensor:
        begin()
        context: AbstractContextManager[Any] = nullcontext() if own_precision else autocast(case.precision, case.device)
        with torch.inference_mode(), context:
            outputs: Tensor = model(images)
        return outputs

    return step


def _training(case: Case, model: nn.Module, inputs: Inputs) -> Callable[[], Tensor]:
    optimizer, begin = Optimizer(model, OPTIM), _step_marker(case)
    parameters = list(model.parameters())

    def step() -> Tensor:
        begin()
        with autocast(case.precision, case.device):
            logits = model(inputs.images)
        loss = F.cross_entropy(logits.float(), inputs.targets)
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _train_loop_step(case: Case, model: nn.Module, inputs: Inputs, parameters: int) -> Workload:
    """Build the training loop's own step: the same work, captured where possible, with its check for non-finite gradients."""
    optim = dataclasses.replace(OPTIM, clip=case.clip)
    schedule = ScheduleSpec(kind="constant")
    recipe = Recipe(optim=optim, schedule=schedule, batch=case.batch, on_nonfinite="skip")
    runner, task = Runner(model, World(case.device)), Classify(case.config.outputs)
    optimizer = Optimizer(model, optim)
    one = Step(runner, task, optimizer, recipe, total=1, precision=case.precision, average=None, schedule=schedule)
    batch = Batch(inputs.images, inputs.targets, torch.arange(case.batch), 0, 0, 0, 1, case.batch)

    def step() -> Tensor:
        one.take([batch], 0)
        return batch.targets

    def is_finite(_: Tensor) -> bool:
        reading = one.read()  # the loop skips a non-finite step and counts it
        return not reading.skipped and math.isfinite(reading.loss)

    def note() -> str:
        why = one.why_not_captured()
        return f"not captured: {why}" if why else ""

    return Workload(step, parameters, is_finite, note)


def _step_marker(case: Case) -> Callable[[], None]:
    """Return a function that marks a new step: CUDA graphs then may reuse their outputs' memory."""
    if case.mode.startswith("graphs"):
        return torch.compiler.cudagraph_mark_step_begin  # type: ignore[no-any-return, unused-ignore]
    return lambda: None
