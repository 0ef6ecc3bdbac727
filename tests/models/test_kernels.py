"""The GPU kernels one by one, against float64 or torch's own.

Without a GPU they run in Triton's interpreter (tests/conftest.py switches it on), in float32 and to float32's accuracy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models.accuracy import FLOAT32, is_accurate
from tests.models.test_fused import CLOSE, DEVICE, LOW, fusing, near, small
from vitrail.models.fused import encoder

pytest.importorskip("triton")
__all__ = ["fusing"]


def test_dropout_is_even_and_differs_by_seed() -> None:
    from vitrail.models.fused.gelu import gelu

    ones = torch.full((40, 1000), 30.0, device=DEVICE)  # so far out GELU changes nothing
    one, two = (
        gelu(ones, torch.zeros(1000, device=DEVICE), True, torch.tensor(seed, device=DEVICE), 0.1) / 30 for seed in (5, 2**40 + 5)
    )
    for found in (one, two):
        assert {round(value, 5) for value in found.unique().tolist()} == {0.0, round(1 / 0.9, 5)}
        dropped = found == 0
        assert abs(float(dropped.float().mean()) - 0.1) < 0.01
        for axis in (0, 1):  # no row, no column is treated differently
            assert float((dropped.float().mean(axis) - 0.1).abs().max()) < 0.35
        neighbours = (dropped[:, 1:] & dropped[:, :-1]).float().mean()
        assert abs(float(neighbours) - 0.01) < 0.004
    assert abs(float(((one == 0) & (two == 0)).float().mean()) - 0.01) < 0.004


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_differs_beyond_32_bits(rate: float) -> None:
    """Offsets of large tensors do not fit into 32 bits: a mask must not begin again there."""
    from tests.models.dropout_kernel import factors

    found = [factors(7, start, rate, DEVICE, 2**15) for start in (0, 2**31, 2**32, 2**32 + 2**31, 3 * 2**32)]
    dropped = torch.stack(found) == 0
    assert abs(float(dropped.float().mean()) - rate) < 0.003
    assert near(torch.stack(found)[~dropped], torch.tensor(1 / (1 - rate), device=DEVICE), 1e-6)
    for number, one in enumerate(dropped):
        for other in dropped[:number]:
            assert abs(float((one & other).float().mean()) - rate**2) < 0.01


def test_older_gpus_use_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import attention_backward

    here = torch.device(DEVICE)
    assert attention_backward.fits(197, 64, here) and not attention_backward.fits(257, 64, here)
    assert not attention_backward.fits(197, 80, here)
    for number, expected in ((8, False), (10, True), (12, False)):
        monkeypatch.setattr(attention_backward, "sm_major", lambda device, number=number: number)
        assert attention_backward.fits(197, 64, here) == expected
    monkeypatch.setattr(attention_backward, "sm_major", lambda device: 9)
    monkeypatch.setattr(attention_backward, "shared_memory", lambda device: 101_376)
    assert not attention_backward.fits(197, 64, here) and attention_backward.fits(50, 64, here)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 256), st.integers(1, 3), st.sampled_from([16, 32]), st.booleans(), st.randoms())
def test_attention_gradients(images: int, tokens: int, heads: int, channels: int, few: bool, random: Any) -> None:
    from vitrail.models.fused.attention_backward import attention_backward
    from vitrail.models.fused.attention_forward import attention_forward

    torch.manual_seed(random.randint(0, 10_000))
    width, queries = heads * channels, 1 if few else tokens
    kv = torch.randn(images, tokens, 2 * width, device=DEVICE, dtype=LOW, requires_grad=True)
    q = torch.randn(images, queries, width, device=DEVICE, dtype=LOW, requires_grad=True)
    grad_out = torch.randn(images, queries, width, device=DEVICE, dtype=LOW)
    results = []
    for dtype in (LOW, torch.float64):
        leaves = [one.detach().to(dtype).requires_grad_() for one in (q, kv)]
        split = [one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (leaves[0], *leaves[1].chunk(2, -1))]
        value = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        dq, dkv = torch.autograd.grad(value, leaves, grad_out.to(dtype))
        results.append((value, dq, dkv, torch.cat([dq.sum(1), dkv.sum(1)], -1)))
    with torch.no_grad():
        out, lse = attention_forward(q, kv, heads)
        dq, dkv, sums, _ = attention_backward(q, kv, out, grad_out, lse, heads)
        if not few:  # all side by side gives the same
            together, none, same, _ = attention_backward(torch.cat([q, kv], -1), None, out, grad_out, lse, heads)
            assert torch.equal(together, torch.cat([dq, dkv], -1)) and not none.numel() and torch.equal(same, sums)
    for found, rounded, exact in zip((out, dq, dkv, sums), *results, strict=True):
        assert is_accurate(found, rounded, exact, 10 * FLOAT32)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 17), st.integers(1, 17))
def test_patchify(batch: int, channels: int, rows: int, columns: int, height: int, width: int) -> None:
    from vitrail.models.fused.patchify import patchify
    from vitrail.models.layers import patchify as plain

    images = torch.randn(batch, channels, rows * height, columns * width, device=DEVICE)
    for given_images in (images, images.mT.contiguous().mT):  # also where rows do not follow each other
        found = patchify(given_images, (height, width), torch.float16)
        assert torch.equal(found, plain(images, (height, width)).half())


@pytest.mark.slow
def test_patchify_runs_in_a_kernel_unless_a_hook_or_gradient_could_tell(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import patchify

    calls, real = [], patchify.patchify
    monkeypatch.setattr(patchify, "patchify", lambda *given: (calls.append(1), real(*given))[1])
    model, images = small(), torch.randn(2, 3, 48, 48, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        found = model(images)
        assert len(calls) == 1 and near(model(images.requires_grad_()), found, CLOSE)
        images, seen = images.detach(), []
        with model.patches.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape)):
            model(images)
        assert seen == [images.shape]
        model.kernels = "plain"
        model(images)
    assert len(calls) == 1


@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_to_seven_digits(tanh: bool) -> None:
    from vitrail.models.fused.gelu import gelu, gelu_backward

    h = torch.linspace(-12, 12, 3 * 700, device=DEVICE).reshape(3, 700)
    grad_out = torch.randn_like(h)
    bias = torch.linspace(-0.5, 0.5, 700, device=DEVICE)
    exact = (h + bias).double().requires_grad_()
    value = F.gelu(exact, approximate="tanh" if tanh else "none")
    (expected,) = torch.autograd.grad(value, exact, grad_out.double())
    dh, sums, again = gelu_backward(h, bias, grad_out, tanh)
    assert (gelu(h, bias, tanh) - value).abs().max() < 2e-6 and torch.equal(again, gelu(h, bias, tanh))
    assert (dh - expected).abs().max() < 5e-6 and (sums - expected.sum(0)).abs().max() < 1e-5


@pytest.mark.parametrize("adds", [True, False])
def test_residual_without_its_mean(adds: bool) -> None:
    from vitrail.models.fused.residual_norm import residual_centred

    x, branch, bias = (torch.randn(size, device=DEVICE) + 3 for size in ((2, 7, 100), (2, 7, 100), (100,)))
    expected = x.double() + branch.double() + bias.double() if adds else x.double()
    mean = expected.mean(-1)
    centred, rstd, found = residual_centred(x, *((branch, bias) if adds else (None, None)), None, None, 0.0, 1e-6, mean.float())
    assert near(centred, expected - mean[..., None], 1e-6) and near(found, 2 * mean, 1e-6)
    assert near(rstd, expected.var(-1, correction=0).add(1e-6).rsqrt(), 2e-6)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows, columns", [(1, 16), (30, 200), (70, 300)])
def test_a_norm_folded_into_a_linear_layer(rows: int, columns: int, has_bias: bool) -> None:
    from vitrail.models.fused.fold_norm import fold_norm, unfold_norm

    weight, scale, shift = (torch.randn(size, device=DEVICE) for size in ((rows, columns), (columns,), (columns,)))
    bias = torch.randn(rows, device=DEVICE) if has_bias else None
    leaves = [one.double().requires_grad_() for one in (weight, scale, shift)]
    folded, folded_bias = leaves[0] * leaves[1], leaves[0] @ leaves[2]
    grads_out = torch.randn(rows, columns, device=DEVICE), torch.randn(rows, device=DEVICE)
    expected = torch.autograd.grad((folded, folded_bias), leaves, [one.double() for one in grads_out])
    found = fold_norm(weight, bias, scale, shift, torch.float32)
    assert near(found[0], folded, 1e-6)
    assert found[1] is not None and near(found[1], folded_bias if bias is None else folded_bias + bias, 1e-6)
    for one, two in zip(unfold_norm(*grads_out, weight, scale, shift), expected, strict=True):
        assert one is not None and near(one, two, 2e-6)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 2), st.integers(1, 300), st.integers(1, 2), st.sampled_from([16, 32]), st.booleans(), st.randoms())
def test_attention_over_few_tokens(images: int, tokens: int, heads: int, channels: int, few: bool, random: Any) -> None:
    from vitrail.models.fused.attention_forward import attention_forward, split_pow2, split_qkv

    torch.manual_seed(random.randint(0, 10_000))
    width = heads * channels
    qkv = 2 * torch.randn(images, tokens, 3 * width, device=DEVICE, dtype=LOW)
    q, kv = (qkv[:, :1, :width], qkv[..., width:]) if few else (qkv, None)
    split = [one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in split_qkv(q, kv)]
    rounded = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
    q64, k64, v64 = (one.double() for one in split)
    scores = q64 @ k64.transpose(-1, -2) * channels**-0.5
    exact = (scores.softmax(-1) @ v64).transpose(1, 2).flatten(2)
    for whole_heads in (True, False):
        out, lse = attention_forward(q, kv, heads, whole_heads=whole_heads)
        assert is_accurate(out, rounded, exact) and near(lse, scores.logsumexp(-1), 1e-5)
    assert sum(split_pow2(tokens)) >= tokens and all(part == 0 or part.bit_count() == 1 for part in split_pow2(tokens))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3), st.sampled_from([8, 24, 200]), st.randoms())
def test_prefix_and_positions(images: int, patches: int, prefix: int, width: int, random: Any) -> None:
    from vitrail.models.fused.prefix_positions import add_prefix_and_positions

    torch.manual_seed(random.randint(0, 10_000))
    given_patches = torch.randn(images, patches, width, device=DEVICE).to(LOW).requires_grad_()
    fixed = torch.randn(prefix + patches, width, device=DEVICE, requires_grad=True)
    rounded = fixed + F.pad(given_patches.float(), (0, 0, prefix, 0))
    leaves = [one.detach().double().requires_grad_() for one in (given_patches, fixed)]
    exact = leaves[1] + F.pad(leaves[0], (0, 0, prefix, 0))
    found, grad_out = add_prefix_and_positions(given_patches, fixed), torch.randn_like(rounded)
    assert found.dtype == torch.float32 and near(found, exact, 1e-6)
    theirs, ours = (torch.autograd.grad(way, (given_patches, fixed), grad_out) for way in (rounded, found))
    for one, two, three in zip(ours, theirs, torch.autograd.grad(exact, leaves, grad_out.double()), strict=True):
        assert one.dtype == two.dtype and is_accurate(one, two, three, 1e-5)


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("width", [24, 200])
def test_residual_and_norm_with_their_gradients(branch: bool, width: int) -> None:
    from vitrail.models.fused.residual_norm import residual_norm

    x, added, bias = (torch.randn(size, device=DEVICE) for size in ((3, 7, width), (3, 7, width), (width,)))
    keep, grads = torch.tensor([0.0, 2.0, 1.0], device=DEVICE), torch.randn(2, 3, 7, width, device=DEVICE)
    added = added.to(LOW)
    results = []
    for dtype in (LOW, torch.float64, None):
        leaves = [one.detach().to(one.dtype if dtype is not torch.float64 else dtype).requires_grad_() for one in (x, added, bias)]
        leaves = leaves if branch else leaves[:1]
        if dtype is None:
            given_branch = (leaves[1], leaves[2], keep) if branch else (None, None, None)
            total, y = residual_norm(leaves[0], *given_branch, None, 0.0, 1e-6, LOW)
        else:
            total = leaves[0] + keep.to(leaves[0])[:, None, None] * (leaves[1] + leaves[2]) if branch else leaves[0]
            y = F.layer_norm(total, (width,), eps=1e-6).to(dtype)
        gradients = torch.autograd.grad((total, y), leaves, (grads[0].to(total.dtype), grads[1].to(LOW).to(y.dtype)))
        results.append((total, y, *gradients))
    # The backward pass reads the normed tokens as they were written, in low precision; torch keeps the float32 residual for it.
    tolerance = max(1e-5, 0.0 if torch.float32 == LOW else torch.finfo(LOW).eps)
    for rounded, exact, found in zip(*results, strict=True):
        assert found.dtype == rounded.dtype and is_accurate(found, rounded, exact, tolerance)


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gelu_in_low_precision(tanh: bool, has_bias: bool) -> None:
    from vitrail.models.fused.gelu import gelu, gelu_backward

    h, dg = torch.randn(2, 9, 300, device=DEVICE).to(LOW)
    bias = torch.randn(300, device=DEVICE).to(LOW) if has_bias else None
    results = []
    for dtype in (LOW, torch.float64):
        leaf = h.to(dtype).requires_grad_()
        value = F.gelu(leaf if bias is None else leaf + bias.to(dtype), approximate="tanh" if tanh else "none")
        (dh,) = torch.autograd.grad(value, leaf, dg.to(dtype))
        results.append((value, dh, dh.sum(0)))
    dh, sums, again = gelu_backward(h, bias, dg, tanh)
    for found, rounded, exact in zip((gelu(h, bias, tanh), dh, sums), *results, strict=True):
        assert is_accurate(found, rounded, exact, 1e-5)
    assert torch.equal(again, gelu(h, bias, tanh))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 5), (300, 3, 24), (1056, 700)])
def test_column_sum(shape: tuple[int, ...]) -> None:
    from vitrail.models.fused.column_sum import column_sum

    parts = torch.randn(shape, device=DEVICE)
    assert (column_sum(parts, torch.float32) - parts.double().sum(0)).abs().max() < 1e-4
    assert column_sum(parts, torch.bfloat16).dtype == torch.bfloat16 and column_sum(parts, torch.float32).shape == shape[1:]


@pytest.mark.parametrize("name", ["gelu", "gelu_fp8", "gelu_backward"])
def test_more_rows_than_a_grid_is_high(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts 65,535 programs in the second and third direction, and many more in the first."""
    from vitrail.models.fused import gelu

    grids: list[tuple[int, ...]] = []

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *given, **named: None

    monkeypatch.setattr(gelu, "_gelu_forward_kernel", Watched())
    monkeypatch.setattr(gelu, "_gelu_backward_kernel", Watched())
    h, bias = torch.zeros(500_000, 16, device=DEVICE), torch.zeros(16, device=DEVICE)
    getattr(gelu, name)(h, bias, *([h] if name == "gelu_backward" else []), False)
    assert len(grids) == 1 and all(count <= 65_535 for count in grids[0][1:])


@pytest.mark.parametrize("rows, classes", [(1, 5), (9, 512), (3, 700)])
def test_cross_entropy_without_copies(rows: int, classes: int) -> None:
    from vitrail.models.fused.cross_entropy import CrossEntropy

    logits = (20 * torch.randn(rows, classes, device=DEVICE)).requires_grad_()
    targets = torch.randint(classes, (rows,), device=DEVICE)
    grads_out = torch.randn(rows, device=DEVICE)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected, logits, grads_out.double())
    losses = CrossEntropy.apply(logits, targets)
    (found,) = torch.autograd.grad(losses, logits, grads_out)
    assert (losses - expected).abs().max() < 3e-5 and (found - gradient).abs().max() < 1e-5


def test_cross_entropy_under_functorch() -> None:
    from vitrail.models.fused.cross_entropy import cross_entropy

    logits, targets = torch.randn(4, 12, device=DEVICE).to(LOW), torch.arange(4, device=DEVICE)
    found = torch.func.grad(lambda one: cross_entropy(one, targets).sum())(logits)
    leaf = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(leaf, targets, reduction="sum"), leaf)
    assert is_accurate(found, exact.to(LOW), exact)


def test_norm_of_a_residual_far_from_zero() -> None:
    """Two passes over the row, not the difference of two large sums."""
    x = 1000 + torch.randn(2, 5, 24, device=DEVICE)
    norm = nn.LayerNorm(24, eps=1e-6).to(DEVICE)
    y = encoder.settle_and_norm(encoder.PendingResidual(x), norm)
    exact = F.layer_norm(x.double(), (24,), eps=1e-6)
    assert (y - exact).abs().max() < 5e-4  # the inputs themselves are only that fine


@pytest.mark.slow
@pytest.mark.parametrize(
    "queries, keys, heads, channels", [(1, 1, 2, 16), (5, 5, 1, 32), (1, 70, 2, 16), (197, 197, 1, 16), (65, 65, 3, 16)]
)
def test_attention_is_checked_for_every_length(
    queries: int, keys: int, heads: int, channels: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vitrail.models.fused import attention_backward, self_test
    from vitrail.models.fused.attention_forward import split_qkv

    low = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    size = torch.device(DEVICE), low, queries, keys, heads, channels
    self_test.attention_works.cache_clear()
    assert self_test.attention_works(*size, True) and not caplog.records
    real = attention_backward.attention_backward

    def wrong(factor: float, q: Tensor, kv: Tensor | None, *rest: Any) -> Any:
        dq, dkv, *others = real(q, kv, *rest)
        values = split_qkv(dq, None if kv is None else dkv)[2]
        values[-1, -1, -channels:] *= factor  # of one image, token and head
        return dq, dkv, *others

    for factor in (3.0, torch.nan):
        monkeypatch.setattr(attention_backward, "attention_backward", partial(wrong, factor))
        caplog.clear()
        self_test.attention_works.cache_clear()
        assert not self_test.attention_works(*size, True) and self_test.attention_works(*size, False)
        assert f"for {keys} tokens is not used here (they are off by" in caplog.text
    self_test.attention_works.cache_clear()
