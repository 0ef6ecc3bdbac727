"""Which plans are valid, and the messages for those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from vitrail.bench.plan import BenchPlan
from vitrail.errors import VitrailError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": ("compield",)}, "compiled"),
        ({"mode": ("timm:default",)}, "eager"),
        ({"mode": ("hf:eager",)}, "--against"),
        ({"mode": ("vitrail:loop-fp8",), "task": ("infer",)}, "no mode 'loop-fp8' for infer"),
        ({"mode": ("fast",)}, "no mode 'fast' for train"),
        ({"mode": ("eager",), "against": ()}, "no mode 'eager'"),
        ({"mode": ("jax:eager",)}, "vitrail, timm, torchvision, hf"),
        ({"against": ("tim",)}, "Did you mean timm"),
        ({"latency": True, "task": ("train",)}, "--task infer"),
        ({"batch": 0}, "--batch is 0"),
        ({"image_size": -1}, "--image-size is -1"),
        ({"clip": 0.0}, "--clip"),
        ({"model": ()}, "--model"),
    ],
)
def test_invalid_plans_are_rejected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        BenchPlan(**wrong)


def test_a_mode_applies_to_every_library_that_has_it_or_to_the_one_named() -> None:
    plan = BenchPlan(mode=("default", "compiled", "timm:eager", "vitrail:loop"), against=("timm", "hf"), task=("train", "infer"))
    modes = {name: plan.modes_of(name, "train", "throughput", gpu=False) for name in ("vitrail", "timm", "hf")}
    assert modes == {"vitrail": ("default", "compiled", "loop"), "timm": ("compiled", "eager"), "hf": ("compiled",)}
    assert plan.modes_of("vitrail", "infer", "throughput", gpu=False) == ("default", "compiled")  # inference has no loop mode


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("metric", ["throughput", "latency", "largest-batch"])
@pytest.mark.parametrize("task", ["train", "infer"])
def test_default_modes_are_valid(task: Any, metric: Any, gpu: bool) -> None:
    if (task, metric) == ("train", "latency") or (metric == "largest-batch" and not gpu):
        return
    for library in ("vitrail", "timm"):
        modes = BenchPlan().modes_of(library, task, metric, gpu=gpu)
        assert modes == BenchPlan(mode=modes, task=(task,)).modes_of(library, task, metric, gpu=gpu)


def test_latency_and_largest_batch_replace_throughput() -> None:
    assert (BenchPlan().tasks, BenchPlan().metrics) == (("train",), ("throughput",))
    assert (BenchPlan(latency=True).tasks, BenchPlan(latency=True).metrics) == (("infer",), ("latency",))
    assert BenchPlan(largest_batch=True, task=("train", "infer")).metrics == ("largest-batch",)
