"""fp8 matmuls: as exact as three mantissa bits can be, and only where they were asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_fused import DEVICE, fusing, results, small
from vitrail.errors import VitrailError
from vitrail.models import BiT, ViT, create_model, model_config
from vitrail.train.config import ModelSpec, Recipe
from vitrail.train.fp8 import use_fp8
from vitrail.train.memory import SimulatedModel, simulate
from vitrail.train.parallel import World
from vitrail.train.plan import make_plan

pytest.importorskip("triton")

__all__ = ["fusing"]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())


def well_rounded(values: Tensor, exact: Tensor) -> Tensor:
    """Tell where the fp8 values are what torch rounds to.

    Triton's interpreter loses the carry of mantissas that round up to the next power of two; a GPU does not.
    """
    expected = exact.to(torch.float8_e4m3fn).float()
    carried = (expected.abs().log2() % 1 == 0) & (expected.abs() > exact.abs())
    return (values.float() == expected) | (carried if DEVICE == "cpu" else False)


@pytest.fixture
def rounding(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels, with fp8 rounding by torch where they are interpreted: the interpreter's lost carries would hide the rest."""
    from vitrail.models.fused import branches, fp8

    def quantised(x: Tensor) -> fp8.Fp8Tensor:
        rows = x.float().flatten(0, -2)
        scales = rows.abs().amax(1).clamp(min=1e-12) / fp8.E4M3_MAX
        return fp8.Fp8Tensor((rows / scales[:, None]).to(fp8.E4M3).view(x.shape), scales)

    if DEVICE == "cpu":
        monkeypatch.setattr(fp8, "quantise", quantised)
        monkeypatch.setattr(branches, "gelu_fp8", lambda *given: quantised(branches.gelu(*given)))


@pytest.mark.parametrize("shape", [(1, 16), (7, 100), (3, 5, 192), (2, 5000)])
def test_every_row_has_its_scale(shape: tuple[int, ...]) -> None:
    from vitrail.models.fused.fp8 import quantise

    x = torch.randn(shape, device=DEVICE) * torch.logspace(-20, 20, shape[-2], device=DEVICE)[:, None]
    made = quantise(x)
    rows = x.flatten(0, -2)
    assert torch.allclose(made.scales, rows.abs().amax(1).clamp(min=1e-12) / 448, rtol=1e-6)
    assert bool(well_rounded(made.values.flatten(0, -2), rows / made.scales[:, None]).all())


def test_a_row_of_zeros_stays_one() -> None:
    from vitrail.models.fused.fp8 import quantise

    made = quantise(torch.zeros(2, 32, device=DEVICE))
    assert not made.values.float().any() and bool(made.scales.isfinite().all())


def test_gelu_in_fp8() -> None:
    from vitrail.models.fused.gelu import gelu_fp8

    h, bias = torch.randn(9, 300, device=DEVICE), torch.randn(300, device=DEVICE)
    made = gelu_fp8(h, bias, False)
    exact = F.gelu(h + bias)
    assert torch.allclose(made.scales, exact.abs().amax(1) / 448, rtol=1e-5)
    near = made.values.float() * made.scales[:, None] - exact
    limit = exact.abs() / (1.9 if DEVICE == "cpu" else 15) + made.scales[:, None] / 100  # a lost carry halves a value
    assert bool((near.abs() <= limit).all()) and relative_error(made.values.float() * made.scales[:, None], exact) < 0.09


def test_matmuls_and_their_gradients() -> None:
    from vitrail.models.fused.branches import linear

    x, weight = torch.randn(3, 20, 64, device=DEVICE), torch.randn(32, 64, device=DEVICE)
    bias = torch.randn(32, device=DEVICE)
    leaves = [one.bfloat16().float().requires_grad_() for one in (x, weight, bias)]
    grad_out = torch.randn(3, 20, 32, device=DEVICE)
    expected = F.linear(*leaves)
    gradients = torch.autograd.grad(expected, leaves, grad_out)
    low = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    entered = leaves[0].to(low)
    found = linear(entered, None, None, leaves[1], leaves[2], fp8=True, refold=False)
    found_gradients = torch.autograd.grad(found, leaves, grad_out.to(low))
    assert 0.005 < relative_error(found, expected) < 0.09 and 0.005 < relative_error(found_gradients[0], gradients[0]) < 0.09
    assert all(relative_error(one, two) < 0.01 for one, two in zip(found_gradients[1:], gradients[1:], strict=True))  # not in fp8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "case"),
    [
        (None, {}),
        (None, {"pooling": "mean"}),
        ("matmuls", {}),
        ("matmuls", {"gelu": "erf"}),
        ("matmuls", {"dropout": 0.1}),
        ("nothing", {}),
        ("nothing", {"dropout": 0.1}),
    ],
    ids=str,
)
def test_gradients_are_nearly_the_same(keep: Any, case: dict[str, Any], rounding: None) -> None:
    model, images = small(depth=2, **case), torch.randn(2, 3, 48, 48, device=DEVICE)
    if keep:
        model.checkpoint_activations(None, keep)
    exact, exact_gradients = results(model, images, "auto")
    fp8, gradients = results(model, images, "fp8")
    assert 0.001 < relative_error(fp8, exact) < 0.1  # fp8 is really used
    assert gradients.keys() == exact_gradients.keys()
    assert all(relative_error(gradients[name], one) < 0.2 for name, one in exact_gradients.items() if float(one.norm()) > 1e-3)


@pytest.mark.slow
def test_many_tokens_in_fp8(rounding: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import attention_backward

    monkeypatch.setattr(attention_backward, "MAX_TOKENS", 4)
    model, images = small(depth=2), torch.randn(2, 3, 48, 48, device=DEVICE)
    exact, _ = results(model, images, "auto")
    fp8, _ = results(model, images, "fp8")
    assert 0.001 < relative_error(fp8, exact) < 0.1


@pytest.mark.slow
def test_evaluation_is_not_in_fp8(fusing: None) -> None:
    model, images = small().eval(), torch.randn(2, 3, 48, 48, device=DEVICE)
    assert torch.equal(results(model, images, "fp8")[0], results(model, images, "auto")[0])


CPU = World(torch.device("cpu"))


@pytest.mark.parametrize(
    "change, recipe, world, words",
    [
        ({}, Recipe(), CPU, "needs a GPU"),
        ({}, Recipe(compile=True), CPU, "--compile"),
        ({}, Recipe(), World(torch.device("cpu"), ranks=2, mode="fsdp"), "FSDP"),
        ({"mlp": 500}, Recipe(), CPU, "multiples of 16"),
        ({"layer_scale": 1e-4}, Recipe(), CPU, "do not cover"),
        ({"position": "relative"}, Recipe(), CPU, "do not cover"),
    ],
)
def test_where_fp8_cannot_be_used_the_error_says_why(change: dict[str, Any], recipe: Recipe, world: World, words: str) -> None:
    model = create_model("ViT-Ti/16", depth=1, **change)
    with pytest.raises(VitrailError, match=words) as raised:
        use_fp8(model, recipe, world)
    assert "--precision auto" in str(raised.value) and isinstance(model, ViT) and model.kernels == "auto"


def test_resnets_have_no_such_layers() -> None:
    model = create_model("BiT-R50x1", outputs=3)
    assert isinstance(model, BiT)
    with pytest.raises(VitrailError, match="ResNet"):
        use_fp8(model, Recipe(), CPU)


@pytest.mark.slow
def test_a_plan_knows_it() -> None:
    sizes = [
        simulate(SimulatedModel(model_config("ViT-Ti/16", outputs=10)), 64, precision=precision) for precision in ("fp8", "bf16")
    ]
    # GELU is a pass of its own there, which computes its value again and keeps one tensor instead of two.
    assert 0.7 < sizes[0].activations / sizes[1].activations < 0.85
    plan = make_plan(Recipe(model=ModelSpec(name="ViT-Ti/16", depth=1), batch=64, precision="fp8"), gpus=1, memory=80, outputs=10)
    alone = simulate(SimulatedModel(model_config("ViT-Ti/16", outputs=10, depth=1)), 64, precision="fp8")
    assert plan.precision == "fp8" and plan.needs[0].activations == alone.activations
