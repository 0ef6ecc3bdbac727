"""Layer norms folded into linear layers, against float64.

The matmul kernel needs a Hopper GPU. Without one a stand-in that computes the same in torch takes its place.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.test_fused import CLOSE, DEVICE, LOW, fusing, near, small
from tests.models.test_hopper_matmul import HOPPER, on_hopper
from vitrail.models.fused.folded_block import FoldedNorm, can_use_folded, fold_norms, folded_block
from vitrail.models.vit import Block

pytest.importorskip("triton")
__all__ = ["fusing"]

MEANS = [0.0, 20.0, 100.0]  # of a token's channels, whose standard deviation is 1
WIDTH = 192


def matmul_in_torch(x: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor | None = None) -> Tensor:
    """`matmul_bias` as the kernel computes it: float32 accumulation, the epilogue, one rounding."""
    acc = x.flatten(0, -2).float() @ weight.float().t()
    if rstd is not None:
        acc *= rstd.flatten()[:, None]
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


def centre_in_torch(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`residual_centred` without a branch."""
    mean = x.double().mean(-1)
    centred = (x.double() - mean[..., None]).to(x.dtype)
    return centred, (centred.double().square().mean(-1) + eps).rsqrt().float(), mean.float()


def centre_in_a_kernel(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from vitrail.models.fused.residual_norm import residual_centred

    return residual_centred(x, None, None, None, None, 0.0, eps, None)


def errors(mean: float, dtype: torch.dtype, tanh: bool | None, matmul: Any, matmul_gelu: Any, centre: Any) -> tuple[float, float]:
    """The error of a folded norm and linear layer against float64, and that of torch's own in low precision."""
    from vitrail.models.fused.folded_block import _folded

    x, (norm, linear) = tokens(mean, dtype), norm_and_linear()

    def plain(norm: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
        hidden = linear(norm(x))
        return hidden if tanh is None else F.gelu(hidden, approximate="tanh" if tanh else "none")

    with torch.no_grad():
        exact = plain(copy.deepcopy(norm).double(), copy.deepcopy(linear).double(), x.double())
        layer = _folded(norm, linear).to(dtype)
        centred, rstd, _ = centre(x, norm.eps)
        given = (layer.weight, layer.bias, *(() if tanh is None else (tanh,)), rstd)
        found = (matmul if tanh is None else matmul_gelu)(centred, *given)
        torchs = plain(norm.to(dtype), linear.to(dtype), x)
    return worst_row(found, exact), worst_row(torchs, exact)


def gelu_in_torch(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool, *norm: Any) -> Tensor:
    hidden = matmul_in_torch(x.float(), weight.float(), bias, *norm)
    return F.gelu(hidden, approximate="tanh" if tanh else "none").to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("tanh", [None, True, False], ids=["bias", "tanh", "erf"])
def test_folding_is_exact_for_any_mean(tanh: bool | None, mean: float, dtype: torch.dtype) -> None:
    ours, torchs = errors(mean, dtype, tanh, matmul_in_torch, gelu_in_torch, centre_in_torch)
    assert ours <= torchs and ours < 0.01


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("tanh", [None, True, False], ids=["bias", "tanh", "erf"])
def test_the_kernels_are_exact_for_any_mean(tanh: bool | None, mean: float, dtype: torch.dtype) -> None:
    from vitrail.models.fused.hopper_matmul import matmul_bias, matmul_bias_gelu

    ours, torchs = errors(mean, dtype, tanh, matmul_bias, matmul_bias_gelu, centre_in_a_kernel)
    assert ours <= 2 * torchs and ours < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("adds", [True, False])
def test_tokens_are_stored_without_their_mean(adds: bool, mean: float) -> None:
    from vitrail.models.fused.residual_norm import residual_centred

    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter has no bfloat16
    x, branch = tokens(mean, dtype), tokens(0.0, dtype)
    bias = torch.linspace(-1, 1, WIDTH, device=DEVICE).to(dtype)
    before = torch.full(x.shape[:-1], 7.0, device=DEVICE)
    given = (branch, bias) if adds else (None, None)
    exact = x.double() + branch.double() + bias.double() if adds else x.double()
    for subtracted in (None, before):
        centred, rstd, row_mean = residual_centred(x, *given, None, None, 0.0, 1e-6, subtracted)
        expected = exact.mean(-1) if subtracted is None else exact.mean(-1) + 7
        assert centred.dtype == dtype and row_mean.dtype == rstd.dtype == torch.float32
        assert row_mean.shape == rstd.shape == x.shape[:-1] and (row_mean - expected).abs().max() < 1e-6 * max(mean, 1) * 4
        error = (centred.double() - (exact - exact.mean(-1, keepdim=True))).abs()
        assert (error <= torch.finfo(dtype).eps * centred.double().abs() / 2 + 1e-6 * max(mean, 1) * 4).all()  # rounded once
        assert (rstd * (centred.double().square().mean(-1) + 1e-6).sqrt() - 1).abs().max() < 1e-5
    assert torch.equal(before, torch.full_like(before, 7.0))


def block(**changes: Any) -> Block:
    made: Any = small(depth=1, width=WIDTH, mlp=4 * WIDTH, **changes).eval().requires_grad_(False).blocks[0]
    made.norm1.eps, made.norm2.eps = 0.05, 0.3  # one taken for the other shows
    return made  # type: ignore[no-any-return]


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
        assert pending.branch is not None and pending.bias is not None and pending.drop_path_scale is None and pending.seed is None
        assert pending.mean is not None and pending.mean.shape == x.shape[:-1]
        ours = (pending.x.double() + pending.mean[..., None].double() - start) + pending.branch.double() + pending.bias.double()
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


def test_when_the_folded_block_is_used(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import selection

    monkeypatch.setattr(selection, "use_norm_epilogue", lambda x, biased, gelu: (biased, gelu) == (3 * WIDTH, 4 * WIDTH))
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
        expected, features = model(images), model.features(images, layers=[0, 1])
    model.kernels = "auto"
    copied = gpu_copy(model, torch.device(DEVICE), LOW)
    widths = 3 * model.config.width, model.config.mlp
    monkeypatch.setattr(selection, "use_norm_epilogue", lambda x, biased, gelu: (biased, gelu) == widths)
    tolerance = (1e-5 + CLOSE) * max(1, shift / 4)  # the residual itself is rounded
    assert near(copied(images), expected, tolerance)
    assert calls == ["matmul_bias", "matmul_bias_gelu"] * 2  # the last block computes the class token only
    found = copied.features(images, layers=[0, 1])  # tokens themselves have their means
    assert len(calls) == 4 + 6 and near(found.pre_logits, features.pre_logits, tolerance)
    assert all(near(found.layers[number], tokens, tolerance) for number, tokens in features.layers.items())
    calls.clear()
    assert near(copied.model.features(images).pre_logits, features.pre_logits, tolerance)  # with gradients
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        assert near(model(images), expected, tolerance)  # its norms have weights of their own
    assert not calls


def test_a_reader_of_the_last_tokens_gets_their_mean(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer norm would not miss it; without one, the class token that the last block computes must have it."""
    from vitrail.models.fused import hopper_matmul, selection
    from vitrail.models.inference.gpu import gpu_copy

    if not HOPPER:
        monkeypatch.setattr(hopper_matmul, "matmul_bias", matmul_in_torch)
        monkeypatch.setattr(hopper_matmul, "matmul_bias_gelu", gelu_in_torch)
    model, images = small(depth=2, qk_norm=True).eval(), torch.randn(1, 3, 48, 48, device=DEVICE)
    model.norm, model.kernels = nn.Identity(), "plain"  # type: ignore[assignment]
    with torch.no_grad():
        model.class_token += 20  # type: ignore[operator]
        expected = model(images)
    model.kernels = "auto"
    copied = gpu_copy(model, torch.device(DEVICE), LOW)
    widths = 3 * model.config.width, model.config.mlp
    monkeypatch.setattr(selection, "use_norm_epilogue", lambda x, biased, gelu: (biased, gelu) == widths)
    assert near(copied(images), expected, (1e-5 + CLOSE) * 5)
