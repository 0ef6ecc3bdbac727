"""What a plan takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from vitrail.bench.plan import BenchPlan
from vitrail.errors import VitrailError


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"modes": ("compield",)}, "compiled"),
        ({"modes": ("timm:default",)}, "eager"),
        ({"modes": ("hf:eager",)}, "--against"),
        ({"modes": ("vitrail:loop-fp8",), "mode": ("infer",)}, "to infer there is no mode 'loop-fp8'"),
        ({"modes": ("fast",)}, "to train there is no mode 'fast'"),
        ({"modes": ("eager",), "against": ()}, "no mode 'eager'"),
        ({"modes": ("jax:eager",)}, "vitrail, timm, torchvision, hf"),
        ({"against": ("tim",)}, "Did you mean timm"),
        ({"latency": True, "mode": ("train",)}, "--mode infer"),
        ({"batch": 0}, "--batch is 0"),
        ({"image_size": -1}, "--image-size is -1"),
        ({"clip": 0.0}, "--clip"),
        ({"model": ()}, "--model"),
    ],
)
def test_mistakes_are_named_before_anything_runs(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(VitrailError, match=words):
        BenchPlan(**wrong)


def test_a_mode_goes_to_those_who_have_it_or_to_the_one_that_is_named() -> None:
    plan = BenchPlan(modes=("default", "compiled", "timm:eager", "vitrail:loop"), against=("timm", "hf"), mode=("train", "infer"))
    modes = {who: plan.modes_of(who, "train", "throughput", gpu=False) for who in ("vitrail", "timm", "hf")}
    assert modes == {"vitrail": ("default", "compiled", "loop"), "timm": ("compiled", "eager"), "hf": ("compiled",)}
    assert plan.modes_of("vitrail", "infer", "throughput", gpu=False) == ("default", "compiled")  # there is no loop to infer in


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("measure", ["throughput", "latency", "largest-batch"])
@pytest.mark.parametrize("task", ["train", "infer"])
def test_the_usual_modes_exist(task: Any, measure: Any, gpu: bool) -> None:
    if (task, measure) == ("train", "latency") or (measure == "largest-batch" and not gpu):
        return
    for who in ("vitrail", "timm"):
        usual = BenchPlan().modes_of(who, task, measure, gpu=gpu)
        assert usual == BenchPlan(modes=usual, mode=(task,)).modes_of(who, task, measure, gpu=gpu)


def test_latency_and_the_largest_batch_take_the_place_of_throughput() -> None:
    assert (BenchPlan().tasks, BenchPlan().measures) == (("train",), ("throughput",))
    assert (BenchPlan(latency=True).tasks, BenchPlan(latency=True).measures) == (("infer",), ("latency",))
    assert BenchPlan(largest_batch=True, mode=("train", "infer")).measures == ("largest-batch",)
