"""Layer norms folded into linear layers, against float64.

The matmul kernel needs a Hopper GPU. Without one the formula of its epilogue is evaluated by torch, and a stand-in that uses it
takes the kernel's place in a model.
"""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.test_fused import CLOSE, DEVICE, LOW, fusing, near, small
from tests.models.test_hopper_matmul import HOPPER, on_hopper
from vitrail.models.fused.folded_norm import FoldedNorm, can_use_folded, fold_norms, folded_block
from vitrail.models.vit import Block

pytest.importorskip("triton")
__all__ = ["fusing"]

MEANS = [0.0, 20.0, 100.0]  # of a token's channels, whose standard deviation is 1
WIDTH = 192


def evaluate_kernel_formula(acc: Tensor, mean: Tensor, rstd: Tensor, row_sums: Tensor) -> Tensor:
    """The epilogue's own lines, as torch computes them."""
    from vitrail.models.fused import hopper_matmul

    formula = types.FunctionType(hopper_matmul.normalise.fn.__code__, {})
    return formula(acc, mean, rstd, row_sums)  # type: ignore[no-any-return]


def matmul_in_torch(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None = None, rstd: Tensor | None = None, row_sums: Tensor | None = None
) -> Tensor:
    """`matmul_bias` as the kernel computes it: float32 accumulation, the epilogue's formula, one rounding."""
    acc = x.flatten(0, -2).float() @ weight.float().t()
    if mean is not None and rstd is not None and row_sums is not None:
        acc = evaluate_kernel_formula(acc, mean, rstd, row_sums)
    return (acc + bias.float()).to(x.dtype).view(*x.shape[:-1], -1)


def tokens(mean: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (mean + torch.randn(3, 37, WIDTH, generator=generator)).to(dtype).to(DEVICE)


def norm_and_linear() -> tuple[nn.LayerNorm, nn.Linear]:
    generator = torch.Generator().manual_seed(2)
    norm, linear = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, 256)
    with torch.no_grad():
        for parameter in (*norm.parameters(), *linear.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        norm.weight.mul_(0.3).add_(1)
        linear.weight.mul_(WIDTH**-0.5).add_(0.02)  # rows that do not sum to zero
    return norm.to(DEVICE), linear.to(DEVICE)


def worst_row(found: Tensor, exact: Tensor) -> float:
    """The largest error of a row, relative to the row."""
    return float(((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def errors(mean: float, dtype: torch.dtype, tanh: bool | None, matmul: Any, matmul_gelu: Any) -> tuple[float, float]:
    """The error of a folded norm and linear layer against float64, and that of torch's own in low precision."""
    from vitrail.models.fused.folded_norm import _folded

    x, (norm, linear) = tokens(mean, dtype), norm_and_linear()

    def plain(norm: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
        hidden = linear(norm(x))
        return hidden if tanh is None else F.gelu(hidden, approximate="tanh" if tanh else "none")

    with torch.no_grad():
        exact = plain(copy.deepcopy(norm).double(), copy.deepcopy(linear).double(), x.double())
        folded, layer = FoldedNorm(norm), _folded(norm, linear).to(dtype)
        rows = x.double().flatten(0, -2)
        statistics = rows.mean(-1).float(), (rows.var(-1, correction=0) + norm.eps).rsqrt().float()
        given = (layer.weight, layer.bias, *(() if tanh is None else (tanh,)), *statistics, folded.row_sums(layer.weight))
        found = (matmul if tanh is None else matmul_gelu)(x, *given)
        torchs = plain(norm.to(dtype), linear.to(dtype), x)
    return worst_row(found, exact), worst_row(torchs, exact)


def gelu_in_torch(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool, *norm: Any) -> Tensor:
    hidden = matmul_in_torch(x.float(), weight.float(), bias, *norm)
    return F.gelu(hidden, approximate="tanh" if tanh else "none").to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("tanh", [None, True, False], ids=["bias", "tanh", "erf"])
def test_the_epilogues_formula_is_exact_for_any_mean(tanh: bool | None, mean: float, dtype: torch.dtype) -> None:
    ours, torchs = errors(mean, dtype, tanh, matmul_in_torch, gelu_in_torch)
    assert ours <= torchs and ours < 0.01


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("tanh", [None, True, False], ids=["bias", "tanh", "erf"])
def test_the_kernels_epilogue_is_exact_for_any_mean(tanh: bool | None, mean: float, dtype: torch.dtype) -> None:
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu

    ours, torchs = errors(mean, dtype, tanh, matmul_bias, matmul_bias_gelu)
    assert ours <= 2 * torchs and ours < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("adds", [True, False])
def test_statistics_are_those_of_the_stored_residual(adds: bool, mean: float) -> None:
    from vitrail.models.fused.residual_norm import residual_stats

    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter has no bfloat16
    x, branch = tokens(mean, dtype), tokens(0.0, dtype)
    bias = torch.linspace(-1, 1, WIDTH, device=DEVICE).to(dtype)
    total, row_mean, rstd = residual_stats(x, *((branch, bias) if adds else (None, None)), None, None, 0.0, 1e-6)
    assert torch.equal(total, (x.float() + branch.float() + bias.float()).to(dtype) if adds else x)
    stored = total.double().flatten(0, -2)
    assert row_mean.dtype == rstd.dtype == torch.float32
    assert (row_mean - stored.mean(-1)).abs().max() < 1e-7 * max(mean, 1) * 4
    assert (rstd * (stored.var(-1, correction=0) + 1e-6).sqrt() - 1).abs().max() < 1e-5


def block(**changes: Any) -> Block:
    model = small(depth=1, **changes).eval().requires_grad_(False)
    return model.blocks[0]  # type: ignore[return-value]


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False}, {"layer_scale": 0.1}], ids=["biased", "no bias", "layer scale"])
def test_a_folded_block_on_the_plain_path(changes: dict[str, Any], mean: float) -> None:
    plain, x = block(**changes), tokens(mean, torch.float32)
    folded = copy.deepcopy(plain)
    fold_norms(folded)
    assert type(folded.norm1) is type(folded.norm2) is FoldedNorm
    with torch.no_grad():
        exact = copy.deepcopy(plain).double()(x.double()) - x.double()
        assert worst_row(folded(x) - x, exact) < 1e-4 * max(1, mean / 20)
        assert type(folded.attention.qkv) is type(folded.mlp.up) is nn.Linear and folded.attention.qkv.bias is not None
        low = torch.bfloat16
        ours, torchs = (worst_row(one.to(low)(x.to(low)) - x.to(low), exact) for one in (folded, plain))
    assert ours <= 1.5 * torchs


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" and not HOPPER, reason="these kernels run on Hopper GPUs")
@pytest.mark.parametrize("gelu", ["erf", "tanh"])
@pytest.mark.parametrize("mean", MEANS)
def test_a_folded_block_in_kernels(mean: float, gelu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual pass and attention are Triton's, interpreted without a GPU; matmuls are Gluon's or their stand-ins."""
    from vitrail.models.fused import hopper_matmul
    from vitrail.models.fused.encoder import PendingResidual

    low = torch.bfloat16 if HOPPER else torch.float16  # the interpreter has no bfloat16
    if not HOPPER:
        monkeypatch.setattr(hopper_matmul, "matmul_bias", matmul_in_torch)
        monkeypatch.setattr(hopper_matmul, "matmul_bias_gelu", gelu_in_torch)
    plain, x, branch = block(gelu=gelu), tokens(mean, low), tokens(0.0, low) / 4
    folded, bias = copy.deepcopy(plain), torch.linspace(-1, 1, WIDTH, device=DEVICE).to(low)
    fold_norms(folded)
    with torch.no_grad():
        start = x.double() + branch.double() + bias.double()
        exact = copy.deepcopy(plain).double()(start) - start
        pending = folded_block(folded.to(low), PendingResidual(x, branch, bias))
        assert pending.branch is not None and pending.bias is not None and pending.keep is None and pending.seed is None
        ours = pending.x.double() + pending.branch.double() + pending.bias.double() - start
        torchs = plain.to(low)(x + (branch + bias)).double() - start
    assert worst_row(ours, exact) <= 2 * worst_row(torchs, exact)


def test_folding_leaves_shared_layers_alone() -> None:
    one, two = block(), block()
    two.mlp = one.mlp
    two.attention = one.attention
    with torch.no_grad():
        two.norm2.weight.mul_(2)
        two.norm1.bias.add_(1)
    x = tokens(0.0, torch.float32)
    expected = [part(x) for part in (one, two)]
    for part in (one, two, one):  # folding twice changes nothing
        fold_norms(part)
    assert all(near(part(x), value, 1e-5) for part, value in zip((one, two), expected, strict=True))


@pytest.mark.parametrize("change", ["subclass", "hook", "no bias"])
def test_only_plain_blocks_are_folded(change: str) -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.mean()

    changed = block()
    if change == "subclass":
        changed.attention.qkv.__class__ = Adapted
    elif change == "hook":
        changed.norm2.register_forward_hook(lambda module, given, out: out + 1)
    else:
        changed.norm1.bias = None
    x = tokens(0.0, torch.float32)
    expected = changed(x)
    fold_norms(changed)
    assert torch.equal(changed(x), expected) and type(changed.norm1) is nn.LayerNorm


def test_row_sums_follow_the_weight() -> None:
    made = block()
    fold_norms(made)
    norm, linear = made.norm1, made.attention.qkv
    assert isinstance(norm, FoldedNorm)

    def is_right(norm: Any, linear: Any) -> bool:
        sums = norm.row_sums(linear.weight)
        exact = linear.weight.double().sum(1)
        return sums.dtype == torch.float32 and bool((sums - exact).abs().max() <= 1e-6)

    first = norm.row_sums(linear.weight)
    assert is_right(norm, linear) and norm.row_sums(linear.weight) is first  # computed once
    with torch.no_grad():
        linear.weight[3] += 1
    assert is_right(norm, linear) and norm.row_sums(linear.weight) is first  # in place, for captured graphs
    made.to(torch.bfloat16)
    assert is_right(norm, linear) and norm.row_sums(linear.weight).abs().max() > 1e-4  # of the rounded weight
    made.to(torch.float32)
    linear.weight.data = torch.ones_like(linear.weight)
    assert is_right(norm, linear)
    linear.weight = nn.Parameter(torch.full_like(linear.weight, 2.0))
    assert is_right(norm, linear)
    linear.load_state_dict({name: value + 1 for name, value in linear.state_dict().items()})
    assert is_right(norm, linear)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        with torch.no_grad():
            copied.attention.qkv.weight *= 3
        assert is_right(copied.norm1, copied.attention.qkv) and is_right(norm, linear)
    with torch.inference_mode():
        linear.weight = nn.Parameter(torch.ones_like(linear.weight), requires_grad=False)
        assert is_right(norm, linear)
        linear.weight[0] = 5
        assert is_right(norm, linear)


def test_when_the_folded_block_is_used(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import selection

    monkeypatch.setattr(selection, "use_norm_epilogue", lambda x, biased, gelu: (biased, gelu) == (576, 768))
    made, x = block().to(LOW), tokens(0.0, LOW)
    with torch.no_grad():
        assert not can_use_folded(made, x)
        fold_norms(made)
        assert can_use_folded(made, x) and not can_use_folded(made, x.half())
        for part in (made, made.attention, made.dropout, made.mlp.dropout, made.skip):
            part.training = True
            assert not can_use_folded(made, x)
            part.training = False
        assert can_use_folded(made, x)
    assert not can_use_folded(made, x)  # gradients


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 20.0])
@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_a_copy_with_folded_norms(gelu: str, shift: float, fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import hopper_matmul, selection
    from vitrail.models.inference.gpu import gpu_copy

    calls: list[str] = []
    for name, stand_in in (("matmul_bias", matmul_in_torch), ("matmul_bias_gelu", gelu_in_torch)):
        run = getattr(hopper_matmul, name) if HOPPER else stand_in
        monkeypatch.setattr(hopper_matmul, name, lambda *given, name=name, run=run: (calls.append(name), run(*given))[1])
    model, images = small(gelu=gelu).eval(), torch.randn(2, 3, 48, 48, device=DEVICE)
    model.kernels = "plain"
    with torch.no_grad():
        model.patches.bias += shift  # means far from zero
        expected, represented = model(images), model.features(images).pre_logits
    model.kernels = "auto"
    copied = gpu_copy(model, torch.device(DEVICE), LOW)
    monkeypatch.setattr(selection, "use_norm_epilogue", lambda x, biased, gelu: (biased, gelu) == (576, 768))
    tolerance = (1e-5 + CLOSE) * max(1, shift / 4)  # the residual itself is rounded
    assert near(copied(images), expected, tolerance)
    assert calls == ["matmul_bias", "matmul_bias_gelu"] * 2  # the last block computes the class token only
    calls.clear()
    assert near(copied.model.features(images).pre_logits, represented, tolerance)  # with gradients
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        assert near(model(images), expected, tolerance)  # its norms have weights of their own
    assert not calls
