"""Optimisers against their formulas in numpy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vitrail.errors import VitrailError
from vitrail.models import create_model
from vitrail.train.config import OptimSpec, Recipe, ScheduleSpec
from vitrail.train.optimizers import Optimizer, convert_decay, explain
from vitrail.train.parameter_groups import is_kernel, parameter_groups


def model(**changes):
    settings = {"outputs": 5, "image_size": 8, "width": 32, "depth": 3, "heads": 1, "mlp": 48, "channels": 1, "seed": 0, **changes}
    return create_model("ViT-Ti/4", **settings)


class OneMatrix(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.inner = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(torch.tensor(values))


def steps_by_hand(spec, start, gradients, factors):
    p = np.array(start, dtype=np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, (gradient, s) in enumerate(zip(gradients, factors, strict=True), 1):
        g = np.array(gradient, dtype=np.float64)
        if spec.decay == "coupled":
            g = g + spec.weight_decay * p
        if spec.name == "sgd":
            m = spec.momentum * m + g
            direction = m
        else:
            m = spec.beta1 * m + (1 - spec.beta1) * g
            v = spec.beta2 * v + (1 - spec.beta2) * g**2
            direction = (m / (1 - spec.beta1**t)) / (np.sqrt(v / (1 - spec.beta2**t)) + spec.eps)
        decay = {"scaled-by-lr": spec.lr * spec.weight_decay, "independent-of-lr": spec.weight_decay, "coupled": 0.0}[spec.decay]
        p = p - s * (spec.lr * direction + decay * p)
    return p


CONVENTIONS = [
    *(("adam", decay) for decay in ("scaled-by-lr", "independent-of-lr", "coupled")),
    *(("adamw", decay) for decay in ("scaled-by-lr", "independent-of-lr")),
    *(("sgd", decay) for decay in ("scaled-by-lr", "independent-of-lr", "coupled")),
]


@pytest.mark.parametrize(("name", "decay"), CONVENTIONS)
def test_each_convention_is_its_formula(name, decay):
    spec = OptimSpec(name=name, lr=0.01, weight_decay=0.003, decay=decay)
    start = [[1.0, -2.0, 3.0], [0.5, 0.25, -4.0]]
    chance = np.random.default_rng(0)
    gradients, factors = chance.normal(size=(4, 2, 3)), [0.25, 1.0, 0.7, 0.1]
    holder = OneMatrix(start)
    optimizer = Optimizer(holder, spec)
    for gradient, factor in zip(gradients, factors, strict=True):
        holder.inner.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.set_rate(factor)
        optimizer.step()
    expected = steps_by_hand(spec, start, gradients, factors)
    np.testing.assert_allclose(holder.inner.weight.detach().numpy(), expected, rtol=2e-6)


def test_the_two_decoupled_conventions_convert_into_each_other():
    assert convert_decay(0.1, 1e-3, "scaled-by-lr", "independent-of-lr") == pytest.approx(1e-4)
    assert convert_decay(1e-4, 1e-3, "independent-of-lr", "scaled-by-lr") == pytest.approx(0.1)
    with pytest.raises(ValueError, match="coupled"):
        convert_decay(0.1, 1e-3, "scaled-by-lr", "coupled")
    assert "0.0001" in explain(OptimSpec(lr=1e-3, weight_decay=0.1))
    assert "AdamW 0.1" in explain(OptimSpec(lr=1e-3, weight_decay=1e-4, decay="independent-of-lr"))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_step_can_be_skipped_on_the_device(name):
    holder = OneMatrix([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    optimizer = Optimizer(holder, OptimSpec(name=name, lr=0.01, weight_decay=0.1))
    before = {key: value.clone() for key, value in optimizer.tensors().items()}
    start = holder.inner.weight.detach().clone()
    holder.inner.weight.grad = torch.full((2, 3), float("nan"))
    optimizer.step(skip=torch.tensor(1.0))
    assert torch.equal(holder.inner.weight, start)
    assert all(torch.equal(value, before[key]) for key, value in optimizer.tensors().items())
    holder.inner.weight.grad = torch.ones(2, 3)
    optimizer.step(skip=torch.tensor(0.0))
    assert not torch.equal(holder.inner.weight, start)


def test_only_kernels_decay():
    network = model(pooling="map", registers=2, layer_scale=0.1, qk_norm=True)
    groups = parameter_groups(network, OptimSpec(weight_decay=0.1))
    decayed = {name for group in groups if group.decays for name in group.names}
    assert {"patches.weight", "head.weight", "blocks.0.attention.qkv.weight", "blocks.2.mlp.down.weight"} <= decayed
    spared = {name for name, _ in network.named_parameters()} - decayed
    assert {"registers", "pool.probe", "norm.weight", "head.bias", "blocks.0.norm1.weight", "blocks.1.scale1.weight"} <= spared
    assert {"blocks.0.attention.q_norm.weight", "blocks.0.attention.k_norm.bias"} <= spared
    assert any(name.startswith("positions.") for name in spared)
    assert sum(group.values for group in groups) == sum(one.numel() for one in network.parameters())
    everything = parameter_groups(network, OptimSpec(weight_decay=0.1, decay_on="all"))
    assert all(group.decays for group in everything)


def test_hybrid_and_bit_kernels_decay():
    for name in ("R26+ViT-S/32", "BiT-R26x1"):
        network = create_model(name, outputs=3, image_size=64, device="meta")
        kernels = [n for n, p in network.named_parameters() if is_kernel(n, p)]
        assert any("conv2.weight" in n for n in kernels)
        assert not any("norm" in n or n.endswith("bias") for n in kernels)


def test_layer_decay_falls_from_the_head_down():
    groups = parameter_groups(model(), OptimSpec(layer_decay=0.5))
    scale = {name: group.scale for group in groups for name in group.names}
    assert scale["head.weight"] == 1
    assert scale["norm.weight"] == 1
    assert [scale[f"blocks.{k}.mlp.up.weight"] for k in range(3)] == [0.125, 0.25, 0.5]
    assert scale["patches.weight"] == scale["class_token"] == 0.0625


def test_frozen_parameters_are_left_out():
    network = model()
    network.requires_grad_(False)
    network.head.requires_grad_(True)
    assert {name for group in parameter_groups(network, OptimSpec()) for name in group.names} == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.0}, "above 0"),
        ({"name": "adamw", "decay": "coupled"}, "use optim.name=adam"),
        ({"name": "adma"}, "Did you mean adam"),
        ({"clip": 0.0}, "None for no clipping"),
        ({"layer_decay": 1.5}, "at most 1"),
        ({"beta1": 1.5}, "from 0 to below 1"),
        ({"name": "sgd", "momentum": 0.0, "nesterov": True}, "needs momentum"),
        ({"eps": -1.0}, r"optim\.eps is -1; it must be at least 0"),
    ],
)
def test_impossible_settings_are_sentences(changes, words):
    with pytest.raises(VitrailError, match=words):
        Recipe(epochs=1, optim=OptimSpec(**changes))


@pytest.mark.parametrize(
    "changes", [{"eval_every": -1.0}, {"checkpoint_every": -1}, {"threads": 0}, {"schedule": ScheduleSpec(end=-1)}]
)
def test_numbers_below_their_least_are_sentences(changes: dict[str, Any]) -> None:
    with pytest.raises(VitrailError, match=r"it must be at least [01]\."):
        Recipe(epochs=1, **changes)


@pytest.mark.parametrize("size", [0, -4])
def test_a_micro_batch_has_images(size: int) -> None:
    with pytest.raises(VitrailError, match=f"micro_batch is {size}; it must be at least 1, or auto"):
        Recipe(epochs=1, micro_batch=size)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_clipping_on_the_way_is_clipping_before(name: Any, clip: float) -> None:
    def stepped(on_the_way: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
        spec = OptimSpec(name=name, lr=0.01, clip=clip, weight_decay=0.0)
        optimizer = Optimizer(model, spec)
        for _ in range(3):
            model(torch.randn(4, 5)).square().sum().backward()
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            assert (norm > clip) == (clip < 1)
            if not on_the_way:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step(norm=norm if on_the_way else None)
            optimizer.zero_grad()
        return [one.detach() for one in model.parameters()]

    for one, two in zip(stepped(True), stepped(False), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)
