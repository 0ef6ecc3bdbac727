"""Matmuls with a bias or GELU epilogue for Hopper GPUs, and their selection.

The kernels need a Hopper GPU: they are written in Gluon, which has no interpreter. Without one their formulas are evaluated by
torch, stand-ins take their place in a model, and test_compiling.py compiles them.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.test_fused import CLOSE, DEVICE, LOW, fusing, near, results, small

pytest.importorskip("triton")

HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="these kernels run on Hopper GPUs")
__all__ = ["fusing"]


@pytest.mark.parametrize("tanh", [True, False])
def test_the_fitted_gelu_is_near_the_exact_one(tanh: bool) -> None:
    from vitrail.models.fused import hopper_matmul

    language = types.SimpleNamespace(minimum=lambda x, most: x.clamp(max=most), exp2=torch.exp2, rsqrt=torch.rsqrt)
    fitted = types.FunctionType(hopper_matmul._gelu.fn.__code__, {"gl": language})  # the kernel's own lines, as torch computes them
    x = torch.linspace(-12, 12, 200_001)
    exact = x.double().requires_grad_()
    value = F.gelu(exact, approximate="tanh" if tanh else "none")
    (derivative,) = torch.autograd.grad(value.sum(), exact)
    found, found_derivative = fitted(x, tanh)
    assert (found - value).abs().max() < 2e-5 and (found_derivative - derivative).abs().max() < 5e-5


@on_hopper
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("rows, inner, columns", [(1, 64, 128), (300, 64, 256), (129, 192, 384), (20_001, 448, 256)])
def test_matmul_epilogues(low: torch.dtype, tanh: bool, rows: int, inner: int, columns: int) -> None:
    from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu, matmul_bias_gelu_with_grad

    x, up = torch.randn(rows, inner, device=DEVICE).to(low), torch.randn(columns, inner, device=DEVICE).to(low) / 4
    bias, down = torch.linspace(-9, 9, columns, device=DEVICE), torch.randn(inner, columns, device=DEVICE).to(low) / 4
    hidden = F.linear(x.double(), up.double(), bias.double()).requires_grad_()
    value = F.gelu(hidden, approximate="tanh" if tanh else "none")
    (derivative,) = torch.autograd.grad(value.sum(), hidden)

    def off(found: Tensor, exact: Tensor) -> float:
        """The largest error beyond that of rounding."""
        exact = exact.detach()
        return float(((found - exact).abs() - torch.finfo(low).eps * exact.abs()).max())

    assert off(matmul_bias(x, up, bias), hidden) < 2e-5
    assert off(matmul_bias_gelu(x, up, bias, tanh), value) < 2e-5
    again, gelu_grad = matmul_bias_gelu_with_grad(x, up, bias, tanh)
    assert off(again, value) < 2e-5 and off(gelu_grad, derivative) < 5e-5
    grad_hidden, grad_bias = matmul_gelu_backward(x, down, gelu_grad)
    expected = (x.double() @ down.double()) * gelu_grad.double()
    assert near(grad_hidden, expected, 0.01) and near(grad_bias, expected.sum(0), 0.01)


@on_hopper
def test_matmuls_are_deterministic() -> None:
    from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward
    from vitrail.models.fused.hopper_matmul import matmul_bias_gelu_with_grad

    x, up, down = (torch.randn(size, device=DEVICE).to(LOW) / 8 for size in ((50_000, 512), (2048, 512), (512, 2048)))
    bias = torch.zeros(2048, device=DEVICE)

    def run() -> tuple[Tensor, ...]:
        value, gelu_grad = matmul_bias_gelu_with_grad(x, up, bias, False)
        return value, gelu_grad, *matmul_gelu_backward(x, down, gelu_grad)

    first = run()
    for _ in range(30):
        assert all(torch.equal(one, two) for one, two in zip(first, run(), strict=True))


def test_fake_rules() -> None:
    from vitrail.models.fused.hopper_gelu_backward import matmul_gelu_backward
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu, matmul_bias_gelu_with_grad

    def run(device: str) -> list[Tensor]:
        x, weight, bias = (torch.zeros(size, dtype=torch.bfloat16, device=device) for size in ((2, 5, 64), (128, 64), (128,)))
        norm = torch.zeros(10, device=device), torch.ones(10, device=device), torch.zeros(128, device=device)
        hidden, gelu_grad = matmul_bias_gelu_with_grad(x, weight, bias, True)
        gelu = matmul_bias_gelu(x, weight, bias, False)
        folded = matmul_bias(x, weight, bias, *norm), matmul_bias_gelu(x, weight, bias, False, *norm)
        return [matmul_bias(x, weight, bias), gelu, hidden, gelu_grad, *folded, *matmul_gelu_backward(x, weight.t(), gelu_grad)]

    for device, mode in (("meta", contextlib.nullcontext()), ("cpu", FakeTensorMode())):
        with mode:
            *found, sums = run(device)
        assert {one.shape for one in found} == {(2, 5, 128)} and {one.dtype for one in found} == {torch.bfloat16}
        assert sums.shape == (128,) and sums.dtype == torch.float32


def test_selection_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import selection

    with FakeTensorMode():
        tokens, odd = torch.zeros(2, 197, 384, dtype=torch.bfloat16), torch.zeros(2, 197, 80, dtype=torch.bfloat16)
        assert selection.use_own_matmul(tokens, 1536, "gelu") and not selection.use_own_matmul(tokens, 1500, "gelu")
        assert not selection.use_own_matmul(odd, 1536, "gelu") and not selection.use_own_matmul(tokens.float(), 1536, "gelu")
        assert not selection.use_own_matmul(tokens[:, :30], 1536, "gelu")
    assert not selection.use_own_matmul(torch.zeros(100, 64, dtype=torch.bfloat16), 128, "gelu")  # on a CPU
    if DEVICE == "cuda":
        monkeypatch.setattr(selection, "_works", lambda device, dtype: True)
        few, many = (torch.zeros(rows, 64, dtype=LOW, device=DEVICE) for rows in (200, 200_000))
        assert (
            selection.use_own_matmul(few, 256, "gelu")
            and not selection.use_own_matmul(few, 256, "bias")
            and selection.use_own_matmul(many, 256, "bias")
        )


@on_hopper
def test_factors_are_tried_rightly() -> None:
    from vitrail.models.fused import selection

    assert selection._norm_epilogue_difference(torch.device(DEVICE), torch.bfloat16) < 0.005


@pytest.mark.parametrize("off, expected", [(0.001, True), (0.5, False), (float("nan"), False)])
def test_factors_are_tried_before_they_are_used(
    off: float, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vitrail.models.fused import selection

    monkeypatch.setattr(selection, "use_own_matmul", lambda x, columns, end: True)
    monkeypatch.setattr(selection, "_norm_epilogue_difference", lambda device, dtype: off)
    selection._norm_epilogue_works.cache_clear()
    assert selection.use_norm_epilogue(torch.zeros(1, 5, 64), 192, 256) == expected
    selection._norm_epilogue_works.cache_clear()
    assert bool(caplog.records) != expected


@pytest.mark.parametrize("number, off, expected", [(9, 0.001, True), (9, 0.5, False), (9, float("nan"), False), (10, 0.001, False)])
def test_they_are_tried_before_they_are_used(
    number: int, off: float, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vitrail.models.fused import selection

    monkeypatch.setattr(selection, "sm_major", lambda device: number)
    monkeypatch.setattr(selection, "_difference", lambda device, dtype: off)
    selection._works.cache_clear()
    assert selection._works(torch.device("cpu"), LOW) == expected
    selection._works.cache_clear()
    assert bool(caplog.records) == (number == 9 and not expected)


def test_a_trial_is_left_alone_by_what_is_in_force_around_it() -> None:
    from vitrail.models.fused.self_test import fault

    def refuse(tensor: Tensor) -> Tensor:
        raise AssertionError("this belongs to somebody else")

    def difference() -> float:
        x = torch.ones(3, 3, requires_grad=True)
        product = (x @ x).square().sum()
        (gradient,) = torch.autograd.grad(product, x)
        return 0.0 if product.dtype == torch.float32 and bool(gradient.isfinite().all()) else 1.0

    around = torch.autograd.graph.saved_tensors_hooks(refuse, refuse)
    with around, torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), torch.inference_mode():
        assert not fault(torch.device("cpu"), 0.5, difference)


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_a_model_with_gelu_epilogues(gelu: str, fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import branches, hopper_gelu_backward, hopper_matmul

    calls: list[str] = []

    def forward(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            hidden = F.linear(x, weight, bias.to(x.dtype)).detach().requires_grad_()
            value = F.gelu(hidden, approximate="tanh" if tanh else "none")
            return value.detach(), torch.autograd.grad(value.sum(), hidden)[0]

    def backward(grad_out: Tensor, weight: Tensor, gelu_grad: Tensor) -> tuple[Tensor, Tensor]:
        found = (grad_out @ weight) * gelu_grad
        return found, found.flatten(0, -2).sum(0, dtype=torch.float32)

    stand_ins: list[tuple[Any, str, Any]] = [
        (hopper_matmul, "matmul_bias_gelu", lambda *given: forward(*given)[0]),
        (hopper_matmul, "matmul_bias_gelu_with_grad", forward),
        (hopper_gelu_backward, "matmul_gelu_backward", backward),
    ]
    for module, name, stand_in in stand_ins:
        run = getattr(module, name) if HOPPER else stand_in
        monkeypatch.setattr(module, name, lambda *given, name=name, run=run: (calls.append(name), run(*given))[1])
    model, images = small(depth=2, gelu=gelu), torch.randn(2, 3, 48, 48, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    monkeypatch.setattr(branches, "use_own_matmul", lambda y, width, end: True)
    fused, gradients = results(model, images, "auto")
    assert calls == ["matmul_bias_gelu_with_grad"] * 2 + ["matmul_gelu_backward"] * 2 and near(fused, plain, 1e-4 + CLOSE)
    assert all(near(gradients[name], one, 1e-4 + 2 * CLOSE) for name, one in plain_gradients.items())
    calls.clear()
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        assert near(model(images), plain, 1e-4 + CLOSE)
    assert calls == ["matmul_bias_gelu"] * 2


@pytest.mark.parametrize("kind", [{}, {"qkv_bias": False}], ids=["biased", "no bias"])
def test_a_model_with_a_bias_epilogue(kind: dict[str, Any], fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import fp8, hopper_matmul

    shapes: list[Any] = []
    run = hopper_matmul.matmul_bias if HOPPER else F.linear
    model, images = small(depth=2, **kind), torch.randn(2, 3, 48, 48, device=DEVICE)
    expected, expected_gradients = results(model, images, "plain")
    monkeypatch.setattr(fp8, "use_own_matmul", lambda x, columns, end: end == "bias")
    monkeypatch.setattr(hopper_matmul, "matmul_bias", lambda *given: (shapes.append(given[1].shape), run(*given))[1])
    found, gradients = results(model, images, "auto")
    # A norm's bias becomes one of the matmul, too. In the last block keys and values are projected apart from the few queries.
    assert shapes == [(576, 192)] and near(found, expected, 1e-4 + CLOSE)
    assert all(near(gradients[name], one, 1e-4 + 2 * CLOSE) for name, one in expected_gradients.items())
