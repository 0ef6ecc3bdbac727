"""Whose step is measured, and in which mode: every subject does the same work on the same images.

Training is forward, cross-entropy, backward and fused AdamW, with the optimiser and the autocast of `vitrail train` for all;
inference is the forward pass. Only the model differs, and how it is run.
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

from vitrail.bench import peers
from vitrail.bench.plan import OURS, Measure, Task
from vitrail.data.batch import Batch
from vitrail.models import ModelConfig, build_model, parameters
from vitrail.tasks import Classify
from vitrail.train.config import OptimSpec, Recipe, ScheduleSpec
from vitrail.train.fp8 import use_fp8
from vitrail.train.optimizers import Optimizer
from vitrail.train.parallel import Runner, World
from vitrail.train.step import Step, autocast

# So small a rate that the labels are not learnt by heart: gradients stay those of a training that has just begun.
OPTIM = OptimSpec(name="adamw", lr=1e-5, weight_decay=0.1, clip=None)
_COMPILE = {"compiled": None, "graphs": "reduce-overhead"}


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    config: ModelConfig
    task: Task
    measure: Measure
    who: str
    mode: str
    batch: int
    precision: str
    device: torch.device
    clip: float | None = None

    def __str__(self) -> str:
        return f"{self.config.name} {self.task}, {self.who} {self.mode}"

    @property
    def casts_weights(self) -> bool:
        """Whether the weights are bf16 themselves, so that nothing is left for autocast to do."""
        return self.mode.endswith("-bf16") and not self.fast

    @property
    def records(self) -> bool:
        """Whether the first steps are recorded, to be replayed later."""
        return self.mode.startswith(("loop", "graphs"))

    @property
    def fast(self) -> bool:
        return self.mode.split("-")[0] == "fast"


class Inputs:
    """A batch of random images and labels on the device, shared by all subjects."""

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
class Subject:
    """A model ready to take steps; dropping it frees its memory."""

    step: Callable[[], Tensor]
    """Takes one, and gives its loss or its outputs."""
    parameters: int
    finite: Callable[[Tensor], bool] = field(default=lambda given: bool(given.isfinite().all()))
    """Whether all numbers were finite, judged by what the last step gave."""
    remark: Callable[[], str] = lambda: ""
    """What one should know about how it ran."""


@contextmanager
def many_compilations() -> Iterator[None]:
    """Let many models be compiled in one process. Beyond eight torch would run the rest uncompiled, and hardly say so."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
        yield


def prepare(case: Case, inputs: Inputs) -> Subject:
    """Build the case's model and its step. Nothing is compiled yet: that happens in the first step."""
    torch.manual_seed(0)
    model = _model(case)
    count = sum(one.numel() for one in model.parameters())
    if case.task == "infer":
        remark = _arithmetic(case, model)
        return Subject(_inference(case, model, inputs), count, remark=lambda: remark)
    if case.mode.startswith("loop"):
        return _whole_step(case, model, inputs, count)
    return Subject(_training(case, model, inputs), count)


def count_note(case: Case, subject: Subject) -> str:
    """What to say if the model is not as large as ours; layers for inference may hold their weights in other ways."""
    ours = parameters(case.config)
    if subject.parameters == ours or case.fast:
        return ""
    return f"{subject.parameters:,} parameters, ours has {ours:,}"


def _model(case: Case) -> nn.Module:
    if case.who == OURS:
        model: nn.Module = build_model(case.config, device=case.device)
        if not case.mode.startswith(("default", "loop", "fast")) and hasattr(model, "kernels"):
            model.kernels = "plain"  # type: ignore[assignment]
        if case.mode == "loop-fp8":
            use_fp8(model, Recipe(), World(case.device))
        if case.mode.startswith("loop-recompute"):
            model.checkpoint_activations(keeps="products" if case.mode.endswith("products") else "nothing")  # type: ignore[operator]
    else:
        with case.device:
            model = peers.build(case.who, case.config)
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
    """Fill a head of zeros: with it the first gradients would be zeros too, and products of zeros draw less power."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == outputs][-1]
    nn.init.trunc_normal_(head.weight, std=0.02)


def _for_inference(case: Case, model: Any) -> nn.Module:
    from vitrail.models.inference import for_inference

    return for_inference(model, precision=_fast_precision(case), device=case.device)


def _arithmetic(case: Case, model: Any) -> str:
    """What a model made for inference computes in, and why: it is not always what the others do."""
    if not case.fast:
        return ""
    from vitrail.models.inference import choose

    chosen = choose(model.config, _fast_precision(case), case.device)
    return f"computes in {chosen.precision}: {chosen.why}"


def _fast_precision(case: Case) -> Any:
    return case.mode.partition("-")[2] or "auto"


def _inference(case: Case, model: nn.Module, inputs: Inputs) -> Callable[[], Tensor]:
    images, begin = inputs.for_case(case), _step_marker(case)
    # Weights that are bf16 already, and layers that choose their own precision, are left alone.
    casts = case.casts_weights or case.fast

    def step() -> Tensor:
        begin()
        context: AbstractContextManager[Any] = nullcontext() if casts else autocast(case.precision, case.device)
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


def _whole_step(case: Case, model: nn.Module, inputs: Inputs, parameters: int) -> Subject:
    """The training loop's own step: the same work, recorded where it can be, and a norm that guards against non-finite numbers."""
    optim = dataclasses.replace(OPTIM, clip=case.clip)
    recipe = Recipe(optim=optim, schedule=ScheduleSpec(kind="constant"), batch=case.batch, on_nonfinite="skip")
    runner, task = Runner(model, World(case.device)), Classify(case.config.outputs)
    one = Step(runner, task, Optimizer(model, optim), recipe, total=1, precision=case.precision, average=None)
    batch = Batch(inputs.images, inputs.targets, torch.arange(case.batch), 0, 0, 0, 1, case.batch)

    def step() -> Tensor:
        one.take([batch], 0)
        return batch.targets

    def finite(_: Tensor) -> bool:
        reading = one.read()  # the loop leaves a bad step out and counts it
        return not reading.skipped and math.isfinite(reading.loss)

    def remark() -> str:
        why = one.why_not_captured()
        return f"not captured: {why}" if why else ""

    return Subject(step, parameters, finite, remark)


def _step_marker(case: Case) -> Callable[[], None]:
    """CUDA graphs reuse their outputs' memory, and are told when a new step may do so."""
    if case.mode.startswith("graphs"):
        return torch.compiler.cudagraph_mark_step_begin  # type: ignore[no-any-return, unused-ignore]
    return lambda: None
