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
from vitrail.models.inference import for_inference

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


def test_a_weight_in_a_flat_buffer_is_aligned_for_tma() -> None:
    """Optimisers that keep all parameters in one buffer leave weights at any address."""
    from vitrail.models.fused.hopper_pingpong import aligned, tma_descriptor

    flat = torch.randn(3 + 128 * 64).bfloat16()
    weight, plain = flat[3:].view(128, 64), torch.zeros(128, 64, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="16-byte"):
        tma_descriptor(weight, 128, 64)
    assert torch.equal(tma_descriptor(aligned(weight), 128, 64).base, weight)
    assert aligned(plain) is plain


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


def test_weights_are_described_to_tma_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA takes no other strides, and a weight may be another's transpose."""
    from vitrail.models.fused import hopper_gelu_backward, hopper_matmul

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **named: None

    strides: list[int] = []
    for module, kernel in ((hopper_matmul, "_matmul_bias_kernel"), (hopper_gelu_backward, "_matmul_gelu_backward_kernel")):
        monkeypatch.setattr(module, kernel, Kernel())
        monkeypatch.setattr(module, "tma_descriptor", lambda matrix, height, width: strides.append(matrix.stride(-1)))
    x, transposed = torch.zeros(2, 64, 128), torch.zeros(128, 256).t()
    hopper_matmul.matmul_bias(x, transposed, torch.zeros(256))
    hopper_matmul.matmul_bias_gelu_with_grad(x, transposed, torch.zeros(256), True)
    hopper_gelu_backward.matmul_gelu_backward(torch.zeros(2, 64, 256), transposed, x)
    assert set(strides) == {1}


@on_hopper
def test_transposed_weights() -> None:
    model, images = small(depth=2), torch.randn(8, 3, 48, 48, device=DEVICE)
    for layer in (
        part for block in model.blocks for part in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down)
    ):
        layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    plain, plain_gradients = results(model, images, "plain")
    fused, gradients = results(model, images, "auto")
    assert near(fused, plain) and all(near(gradients[name], one, 2 * CLOSE) for name, one in plain_gradients.items())
    made = for_inference(model.eval(), "bf16")
    assert near(made(images), plain, 2 * CLOSE)


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
        rstd = torch.ones(2, 5, device=device)
        hidden, gelu_grad = matmul_bias_gelu_with_grad(x, weight, bias, True)
        gelu = matmul_bias_gelu(x, weight, bias, False)
        folded = matmul_bias(x, weight, bias, rstd), matmul_bias_gelu(x, weight, bias, False, rstd)
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
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("check", ["_difference", "_norm_epilogue_difference"])
def test_the_kernels_pass_their_self_test(check: str, low: torch.dtype) -> None:
    from vitrail.models.fused import selection

    assert getattr(selection, check)(torch.device(DEVICE), low) < 0.6 * selection.TOLERANCE


def _linear(x: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor | None = None) -> Tensor:
    acc = x.float() @ weight.float().t()
    return (acc if rstd is None else acc * rstd[:, None]) + bias.float()


def _centred(x: Tensor, branch: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    total = x.float() + branch.float() + bias.float()
    centred = (total - total.mean(-1, keepdim=True)).to(x.dtype)
    return centred, (centred.float().square().mean(-1) + 1e-6).rsqrt(), total.mean(-1) + rest[-1]


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def _with_grad(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    hidden = _linear(x, weight, bias).requires_grad_()
    with torch.enable_grad():
        value = _gelu(hidden, tanh)
        return value.detach().to(x.dtype), torch.autograd.grad(value.sum(), hidden)[0].to(x.dtype)


def _backward(grad_out: Tensor, weight: Tensor, gelu_grad: Tensor) -> tuple[Tensor, Tensor]:
    exact = (grad_out.float() @ weight.float()) * gelu_grad.float()
    return exact.to(grad_out.dtype), exact.sum(0)


def _spoil_last_row(out: Tensor) -> Tensor:
    out[-1] *= 1.05
    return out


RIGHT: dict[str, Any] = {
    "matmul_bias": lambda x, weight, bias, *norm: _linear(x, weight, bias, *norm).to(x.dtype),
    "matmul_bias_gelu": lambda x, weight, bias, tanh, *norm: _gelu(_linear(x, weight, bias, *norm), tanh).to(x.dtype),
    "matmul_bias_gelu_with_grad": _with_grad,
    "matmul_gelu_backward": _backward,
    "residual_centred": _centred,
}
WRONG: dict[str, tuple[str, Any]] = {
    "last row of a bias": ("matmul_bias", lambda *given: _spoil_last_row(RIGHT["matmul_bias"](*given))),
    "few rows": (
        "matmul_bias_gelu",
        lambda x, *given: RIGHT["matmul_bias_gelu"](x, *given) * (1.02 if len(x) < 1000 else 1.0),
    ),
    "tanh": ("matmul_bias_gelu", lambda *given: RIGHT["matmul_bias_gelu"](*given) * (1.05 if given[3] else 1.0)),
    "erf": ("matmul_bias_gelu", lambda *given: RIGHT["matmul_bias_gelu"](*given) * (1.0 if given[3] else 1.05)),
    "not a number": ("matmul_bias", lambda *given: RIGHT["matmul_bias"](*given) * torch.nan),
    "derivative": ("matmul_bias_gelu_with_grad", lambda *given: (_with_grad(*given)[0], _spoil_last_row(_with_grad(*given)[1]))),
    "gradient": ("matmul_gelu_backward", lambda *given: (_spoil_last_row(_backward(*given)[0]), _backward(*given)[1])),
    "bias gradient": ("matmul_gelu_backward", lambda *given: (_backward(*given)[0], 1.05 * _backward(*given)[1])),
    "no norm": ("matmul_bias", lambda x, weight, bias, *norm: RIGHT["matmul_bias"](x, weight, bias)),
    "no norm before GELU": (
        "matmul_bias_gelu",
        lambda x, weight, bias, tanh, *norm: RIGHT["matmul_bias_gelu"](x, weight, bias, tanh),
    ),
    "tokens not centred": ("residual_centred", lambda x, *given: (x, *_centred(x, *given)[1:])),
    "mean not kept": ("residual_centred", lambda *given: (*_centred(*given)[:2], _centred(*given)[2] - given[-1])),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="stands in for kernels that this machine may have")
@pytest.mark.parametrize("case", [None, *WRONG])
def test_the_self_test_finds_what_is_wrong(case: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import hopper_gelu_backward, hopper_matmul, residual_norm, selection

    modules = {"matmul_gelu_backward": hopper_gelu_backward, "residual_centred": residual_norm}
    wrong = dict([WRONG[case]]) if case else {}
    for name, run in {**RIGHT, **wrong}.items():
        monkeypatch.setattr(modules.get(name, hopper_matmul), name, run)
    monkeypatch.setattr(selection, "_ROWS", 1037)
    device = torch.device("cpu")
    worst = max(selection._difference(device, torch.bfloat16), selection._norm_epilogue_difference(device, torch.bfloat16))
    assert (worst > selection.TOLERANCE) if case else (worst < 0.6 * selection.TOLERANCE)


@pytest.mark.parametrize("worst, expected", [(0.001, True), (0.5, False), (float("nan"), False)])
def test_self_test_decides_about_norm_epilogues(
    worst: float, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vitrail.models.fused import selection

    monkeypatch.setattr(selection, "use_own_matmul", lambda x, columns, epilogue: True)
    monkeypatch.setattr(selection, "_norm_epilogue_difference", lambda device, dtype: worst)
    selection._norm_epilogue_works.cache_clear()
    assert selection.use_norm_epilogue(torch.zeros(1, 5, 64), 192, 256) == expected
    selection._norm_epilogue_works.cache_clear()
    assert bool(caplog.records) != expected


@pytest.mark.parametrize("sm, worst, expected", [(9, 0.001, True), (9, 0.5, False), (9, float("nan"), False), (10, 0.001, False)])
def test_self_test_decides_about_matmuls(
    sm: int, worst: float, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vitrail.models.fused import selection

    monkeypatch.setattr(selection, "sm_major", lambda device: sm)
    monkeypatch.setattr(selection, "_difference", lambda device, dtype: worst)
    selection._works.cache_clear()
    assert selection._works(torch.device("cpu"), LOW) == expected
    selection._works.cache_clear()
    assert bool(caplog.records) == (sm == 9 and not expected)


@pytest.mark.parametrize("name", ["_works", "_norm_epilogue_works"])
def test_a_transient_failure_is_not_remembered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import selection, self_test

    answers = iter([torch.OutOfMemoryError("CUDA out of memory"), 0.001])

    def difference(device: torch.device, dtype: torch.dtype) -> float:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    check = getattr(selection, name)
    monkeypatch.setattr(selection, "sm_major", lambda device: 9)
    monkeypatch.setattr(selection, name.replace("works", "difference"), difference)
    monkeypatch.setattr(self_test, "_RETRY_SECONDS", 0.0)
    check.cache_clear()
    assert not check(torch.device("cpu"), LOW) and check(torch.device("cpu"), LOW)
    check.cache_clear()


def test_a_self_test_ignores_the_callers_modes() -> None:
    from vitrail.models.fused.self_test import fault

    def refuse(tensor: Tensor) -> Tensor:
        raise AssertionError("a saved-tensor hook of the caller was called")

    def difference() -> float:
        x = torch.ones(3, 3, requires_grad=True)
        loss = (x @ x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        return 0.0 if loss.dtype == torch.float32 and bool(gradient.isfinite().all()) else 1.0

    hooks = torch.autograd.graph.saved_tensors_hooks(refuse, refuse)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), torch.inference_mode():
        assert not fault(torch.device("cpu"), 0.5, difference)


@pytest.mark.slow
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
    model, images = small(depth=2, gelu=gelu), torch.randn(2, 3, 48, 48, device=DEVICE)
    if HOPPER:
        results(model, images, "auto")  # the self-tests run now, and are not counted
    for module, name, stand_in in stand_ins:
        run = getattr(module, name) if HOPPER else stand_in
        monkeypatch.setattr(module, name, lambda *given, name=name, run=run: (calls.append(name), run(*given))[1])
    plain, plain_gradients = results(model, images, "plain")
    monkeypatch.setattr(branches, "use_own_matmul", lambda y, width, end: True)
    fused, gradients = results(model, images, "auto")
    assert calls == ["matmul_bias_gelu_with_grad"] * 2 + ["matmul_gelu_backward"] * 2 and near(fused, plain, 1e-4 + CLOSE)
    assert all(near(gradients[name], one, 1e-4 + 2 * CLOSE) for name, one in plain_gradients.items())
    calls.clear()
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        assert near(model(images), plain, 1e-4 + CLOSE)
    assert calls == ["matmul_bias_gelu"] * 2
    calls.clear()
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)  # what comes before it is frozen, and has no backward pass
    _, gradients = results(model, images, "auto")
    assert calls == ["matmul_bias_gelu", "matmul_bias_gelu_with_grad", "matmul_gelu_backward"]
    assert set(gradients) == {name for name in plain_gradients if name.startswith("blocks.1.")}
    assert all(near(one, plain_gradients[name], 1e-4 + 2 * CLOSE) for name, one in gradients.items())


@pytest.mark.slow
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
    assert shapes == [(3 * model.config.width, model.config.width)] and near(found, expected, 1e-4 + CLOSE)
    assert all(near(gradients[name], one, 1e-4 + 2 * CLOSE) for name, one in expected_gradients.items())
