"""torch's FlopCounterMode counts the matmuls inside our operators, as it counts those of the plain path.

Around a whole model the counter's own hooks make the model take the plain path. Our operators are counted where it is entered
between forward and backward, or around operators; here those hooks are overlooked.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop, sdpa_flop

from tests.models.test_fused import DEVICE, fusing, small
from vitrail.models import ViT, create_model
from vitrail.models.config import ViTConfig
from vitrail.models.cost import needed_flops

pytest.importorskip("triton")
from vitrail.models.fused import branches, hopper_attention, hopper_gelu_backward, hopper_matmul, ordinary_call

__all__ = ["branches", "fusing", "hopper_attention", "hopper_gelu_backward", "hopper_matmul"]  # imported, they register operators
CONFIG = create_model("ViT-S/16", outputs=10, depth=3, pooling="mean").config

MATMULS = {"matmul_bias", "matmul_bias_gelu", "matmul_bias_gelu_with_grad", "matmul_gelu_backward", "fp8_matmul", "weight_grad"}
ATTENTION = {"attention_forward", "attention_backward", "hopper_attention"}


@pytest.fixture(autouse=True)
def _attention_on_cpus_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of torch have formulas for attention on GPUs only."""
    aten = torch.ops.aten
    monkeypatch.setitem(flop_registry, aten._scaled_dot_product_flash_attention_for_cpu, sdpa_flop)
    monkeypatch.setitem(flop_registry, aten._scaled_dot_product_flash_attention_for_cpu_backward, sdpa_backward_flop)


@pytest.fixture
def _counter_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordinary_call, "_has_global_hooks", lambda: False)


def count(kernels: str, config: ViTConfig = CONFIG, *, train: bool, batch: int = 2) -> dict[Any, int]:
    """FLOPs by operator of one pass of a ViT-S/16, with fake tensors that stand for a Hopper GPU's."""
    with FakeTensorMode():
        model = ViT(config).train(train)
        model.kernels = kernels  # type: ignore[assignment]
        images = torch.empty(batch, 3, 224, 224)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
            if train:
                logits.sum().backward()
    return dict(counter.get_flop_counts()["Global"])


def ours(counted: dict[Any, int]) -> set[str]:
    return {str(name).removeprefix("vitrail.") for name in counted if str(name).startswith("vitrail.")}


@pytest.mark.usefixtures("_counter_overlooked")
@pytest.mark.parametrize("kernels", ["auto", "fp8"])
def test_a_training_step_counts_the_same_on_both_paths(kernels: str) -> None:
    plain, fused = count("plain", train=True), count(kernels, train=True)
    assert not ours(plain) and {"attention_forward", "attention_backward", "weight_grad"} <= ours(fused)
    assert ("fp8_matmul" if kernels == "fp8" else "matmul_gelu_backward") in ours(fused)
    assert sum(fused.values()) == sum(plain.values())


@pytest.mark.usefixtures("_counter_overlooked")
def test_inference_counts_the_same_on_both_paths() -> None:
    plain, fused = count("plain", train=False), count("auto", train=False)
    assert {"attention_forward", "matmul_bias_gelu"} <= ours(fused)
    assert sum(fused.values()) == sum(plain.values())


@pytest.mark.usefixtures("_counter_overlooked")
def test_counted_as_the_cost_model_does() -> None:
    config = CONFIG.replace(pooling="class", class_token=True)  # the plain path projects queries that are not used
    assert sum(count("auto", config, train=False, batch=1).values()) == needed_flops(config)


@pytest.mark.slow
def test_a_backward_pass_alone_counts_the_same_on_both_paths(fusing: None) -> None:
    model, images, totals = small(pooling="mean"), torch.randn(2, 3, 48, 48, device=DEVICE), []
    for kernels in ("plain", "auto"):
        model.kernels = kernels  # type: ignore[assignment]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            logits = model(images)
        with FlopCounterMode(display=False) as counter:
            logits.sum().backward()
        assert bool(ours(counter.get_flop_counts()["Global"])) == (kernels == "auto")
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_every_operator_with_a_matmul_has_a_formula() -> None:
    registered = {str(name).removeprefix("vitrail.") for name in flop_registry if str(name).startswith("vitrail.")}
    assert registered == MATMULS | ATTENTION


def test_attention_in_both_layouts() -> None:
    separate = flop_registry[torch.ops.vitrail.attention_forward]
    q, kv, qkv = torch.empty(2, 5, 24), torch.empty(2, 7, 48), torch.empty(2, 7, 72)
    assert separate(q, kv, 3, out_val=q) == 2 * 2 * math.prod((2, 5, 7, 24))
    assert separate(qkv, None, 3, out_val=q) == 2 * 2 * math.prod((2, 7, 7, 24))
    assert flop_registry[torch.ops.vitrail.hopper_attention](qkv, 3, False, out_val=q) == 2 * 2 * math.prod((2, 7, 7, 24))
