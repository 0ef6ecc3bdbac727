"""Products with a bias or GELU in their end, and when they are taken.

The kernels need a Hopper GPU: they are written in Gluon, which has no interpreter. Without one their arithmetic is tested as torch
computes it, the way into and out of them with stand-ins, and test_compiling.py compiles them.
"""

from __future__ import annotations

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
    from vitrail.models.fused import product

    language = types.SimpleNamespace(minimum=lambda x, most: x.clamp(max=most), exp2=torch.exp2, rsqrt=torch.rsqrt)
    fitted = types.FunctionType(product._gelu.fn.__code__, {"gl": language})  # the kernel's own lines, as torch computes them
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
def test_products_with_something_in_their_end(low: torch.dtype, tanh: bool, rows: int, inner: int, columns: int) -> None:
    from vitrail.models.fused.back_gelu import back_gelu
    from vitrail.models.fused.product import product, up_gelu

    y, up = torch.randn(rows, inner, device=DEVICE).to(low), torch.randn(columns, inner, device=DEVICE).to(low) / 4
    bias, down = torch.linspace(-9, 9, columns, device=DEVICE), torch.randn(inner, columns, device=DEVICE).to(low) / 4
    entering = F.linear(y.double(), up.double(), bias.double()).requires_grad_()
    value = F.gelu(entering, approximate="tanh" if tanh else "none")
    (derivative,) = torch.autograd.grad(value.sum(), entering)
    slope = torch.full((rows, columns), torch.nan, device=DEVICE, dtype=low)

    def off(found: Tensor, exact: Tensor) -> float:
        """By how much it is off beyond what rounding does."""
        exact = exact.detach()
        return float(((found - exact).abs() - torch.finfo(low).eps * exact.abs()).max())

    assert off(product(y, up, bias), entering) < 2e-5
    assert off(up_gelu(y, up, bias, tanh), value) < 2e-5
    factors = torch.linspace(0.5, 2, rows, device=DEVICE)
    scaled = F.linear(y.double() * factors.double()[:, None], up.double(), bias.double())
    assert off(product(y, up, bias, factors=factors), scaled) < 2e-5
    assert off(up_gelu(y, up, bias, tanh, factors=factors), F.gelu(scaled, approximate="tanh" if tanh else "none")) < 2e-5
    assert off(up_gelu(y, up, bias, tanh, slope=slope), value) < 2e-5
    assert off(slope, derivative) < 5e-5
    dhidden, dbias = back_gelu(y, down, slope)
    expected = (y.double() @ down.double()) * slope.double()
    assert near(dhidden, expected, 0.01) and near(dbias, expected.sum(0), 0.01)


@on_hopper
def test_products_give_the_same_every_time() -> None:
    from vitrail.models.fused.back_gelu import back_gelu
    from vitrail.models.fused.product import up_gelu

    y, up, down = (torch.randn(size, device=DEVICE).to(LOW) / 8 for size in ((50_000, 512), (2048, 512), (512, 2048)))
    slope, bias = y.new_empty(50_000, 2048), torch.zeros(2048, device=DEVICE)
    first = (up_gelu(y, up, bias, False, slope=slope), *back_gelu(y, down, slope))
    for _ in range(30):
        again = (up_gelu(y, up, bias, False, slope=slope), *back_gelu(y, down, slope))
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_when_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import selection

    with FakeTensorMode():
        tokens, odd = torch.zeros(2, 197, 384, dtype=torch.bfloat16), torch.zeros(2, 197, 80, dtype=torch.bfloat16)
        assert selection.use_own_matmul(tokens, 1536, "gelu") and not selection.use_own_matmul(tokens, 1500, "gelu")
        assert not selection.use_own_matmul(odd, 1536, "gelu") and not selection.use_own_matmul(tokens.float(), 1536, "gelu")
        assert not selection.use_own_matmul(tokens[:, :30], 1536, "gelu")
    assert not selection.use_own_matmul(torch.zeros(100, 64, dtype=torch.bfloat16), 128, "gelu")  # on a processor
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
def test_a_model_with_gelu_in_the_ends_of_products(gelu: str, fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import back_gelu, branches, product

    taken: list[str] = []

    def up_in_torch(y: Tensor, weight: Tensor, bias: Tensor, tanh: bool, *, slope: Tensor | None) -> Tensor:
        with torch.enable_grad():
            entering = F.linear(y, weight, bias.to(y.dtype)).detach().requires_grad_()
            value = F.gelu(entering, approximate="tanh" if tanh else "none")
            if slope is not None:
                slope.copy_(torch.autograd.grad(value.sum(), entering)[0])
        return value.detach()

    def back_in_torch(dbranch: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        found = (dbranch @ weight) * slope
        return found, found.flatten(0, -2).sum(0, dtype=torch.float32)

    forward, backward = (product.up_gelu, back_gelu.back_gelu) if HOPPER else (up_in_torch, back_in_torch)

    def watched(*given: Any, slope: Tensor | None) -> Tensor:
        taken.append("value" if slope is None else "both")
        return forward(*given, slope=slope)

    def watched_back(*given: Any) -> tuple[Tensor, Tensor]:
        taken.append("back")
        return backward(*given)

    model, images = small(depth=2, gelu=gelu), torch.randn(2, 3, 48, 48, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    monkeypatch.setattr(branches, "use_own_matmul", lambda y, width, end: True)
    monkeypatch.setattr(product, "up_gelu", watched)
    monkeypatch.setattr(back_gelu, "back_gelu", watched_back)
    fused, gradients = results(model, images, "auto")
    assert taken == ["both", "both", "back", "back"] and near(fused, plain, 1e-4 + CLOSE)
    assert all(near(gradients[name], one, 1e-4 + 2 * CLOSE) for name, one in plain_gradients.items())
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        assert near(model(images), plain, 1e-4 + CLOSE)
    assert taken[4:] == ["value", "value"]


@pytest.mark.parametrize("kind", [{}, {"qkv_bias": False}], ids=["biased", "no bias"])
def test_a_bias_in_the_end_of_a_product(kind: dict[str, Any], fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import fp8, product

    taken: list[Any] = []
    real = product.product if HOPPER else F.linear
    model, images = small(depth=2, **kind), torch.randn(2, 3, 48, 48, device=DEVICE)
    expected, expected_gradients = results(model, images, "plain")
    monkeypatch.setattr(fp8, "use_own_matmul", lambda x, columns, end: end == "bias")
    monkeypatch.setattr(product, "product", lambda *given: (taken.append(given[1].shape), real(*given))[1])
    found, gradients = results(model, images, "auto")
    # A norm's shift is a bias, too; in the last block keys and values are made apart, for the class token's queries are few.
    assert taken == [(576, 192)] and near(found, expected, 1e-4 + CLOSE)
    assert all(near(gradients[name], one, 1e-4 + 2 * CLOSE) for name, one in expected_gradients.items())


def test_a_copy_whose_norms_are_factors_in_the_ends_of_products(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import product, selection
    from vitrail.models.inference.gpu import gpu_copy

    taken: list[str] = []

    def watched(name: str, real: Any, stand_in: Any) -> Any:
        def call(x: Tensor, weight: Tensor, bias: Tensor, *rest: Any, factors: Tensor) -> Tensor:
            taken.append(name)
            if HOPPER:
                return real(x, weight, bias, *rest, factors=factors)  # type: ignore[no-any-return]
            return stand_in(F.linear(x * factors.view(*x.shape[:-1], 1), weight, bias))  # type: ignore[no-any-return]

        return call

    model, images = small(gelu="erf").eval(), torch.randn(2, 3, 48, 48, device=DEVICE)
    model.kernels = "plain"
    with torch.no_grad():
        model.patches.bias += 2  # means far from zero, which must not be felt
        expected, represented = model(images), model.features(images).pre_logits
    model.kernels = "auto"
    copied = gpu_copy(model, torch.device(DEVICE), LOW)
    monkeypatch.setattr(selection, "use_norm_epilogue", lambda x, biased, gelu: (biased, gelu) == (576, 768))
    monkeypatch.setattr(product, "product", watched("bias", product.product, lambda x: x))
    monkeypatch.setattr(product, "up_gelu", watched("gelu", product.up_gelu, F.gelu))
    assert near(copied(images), expected, 1e-5 + CLOSE)
    assert taken == ["bias", "gelu"] * 2  # the last block computes the class token only
    taken.clear()
    assert near(copied.features(images).pre_logits, represented, 1e-5 + CLOSE)  # with gradients
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        assert near(model(images), expected, 1e-5 + CLOSE)  # its norms have weights of their own
    assert not taken
