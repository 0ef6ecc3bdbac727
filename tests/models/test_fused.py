"""The fused kernels compute what the plain blocks do, forward and backward.

Without a GPU they run in Triton's interpreter (tests/conftest.py switches it on), in float32 and to float32's accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models.peers import randomise
from vitrail.models import ViT, create_model
from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.fused import encoder
from vitrail.models.masked import MaskedPatches, Pretraining

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if torch.cuda.is_available() else torch.float32
CLOSE = 3e-2 if torch.cuda.is_available() else 3e-6  # of the largest value


def near(a: Tensor, b: Tensor, tolerance: float = CLOSE) -> bool:
    scale = max(float(b.detach().abs().max()), 0.3)
    return bool((a.detach().float() - b.detach().float()).abs().max() <= tolerance * scale)


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fused kernels wherever the block allows them, though this may be a processor and float32."""
    if DEVICE == "cuda":  # they are tried now, and not in the middle of a test that has replaced a part of them
        assert encoder.can_fuse(torch.zeros(1, device=DEVICE, dtype=LOW))
    monkeypatch.setattr(encoder, "low_precision", lambda x: LOW)
    real = encoder.can_fuse
    monkeypatch.setattr(encoder, "can_fuse", lambda x: DEVICE == "cpu" or real(x))
    yield


def small(**changes: Any) -> ViT:
    changes = {"image_size": 48, "depth": 3, "outputs": 7, "heads": 3, **changes}
    model = randomise(create_model("ViT-Ti/16", seed=0, **changes)).train().to(DEVICE)
    assert isinstance(model, ViT)
    return model


def results(model: ViT, images: Tensor, kernels: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.kernels = kernels  # type: ignore[assignment]
    model.zero_grad()
    torch.manual_seed(3)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        logits = model(images)
    (logits.float() * torch.linspace(-1, 1, logits.shape[1], device=DEVICE)).sum().backward()
    return logits, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


CASES: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "erf": {"gelu": "erf"},
    "mean pooling": {"pooling": "mean", "final_norm": "after-pool"},
    "attention pooling": {"pooling": "map"},
    "distilled": {"distill_token": True},
    "registers": {"registers": 2},
    "no bias": {"qkv_bias": False},
    "sincos": {"position": "sincos2d"},
    "wide heads": {"heads": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_plain_ones(case: str, fusing: None) -> None:
    model, images = small(**CASES[case]), torch.randn(2, 3, 48, 48, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    fused, fused_gradients = results(model, images, "auto")
    assert near(fused, plain)
    assert fused_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert near(fused_gradients[name], gradient, 2 * CLOSE), name


def test_the_fused_path_is_really_taken(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    run = encoder.run_blocks

    def watched(blocks: Any, x: Tensor, **options: Any) -> Any:
        seen.append(len(blocks))
        return run(blocks, x, **options)

    monkeypatch.setattr(encoder, "run_blocks", watched)
    model = small()
    results(model, torch.randn(1, 3, 48, 48, device=DEVICE), "auto")
    results(model, torch.randn(1, 3, 48, 48, device=DEVICE), "plain")
    assert seen == [3]


def test_stochastic_depth_drops_the_same_branches(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = [torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0]), torch.tensor([1.5, 1.0])] * 2
    model, images = small(stochastic_depth=0.5), torch.randn(2, 3, 48, 48, device=DEVICE)
    drawn = iter(factors)
    for block in model.blocks:
        monkeypatch.setattr(block.skip, "forward", lambda x: x * next(drawn).to(x)[:, None, None])
    plain, plain_gradients = results(model, images, "plain")
    drawn = iter(factors)
    monkeypatch.setattr(encoder, "_keep", lambda block, x: next(drawn).to(DEVICE))
    fused, fused_gradients = results(model, images, "auto")
    assert near(fused, plain)
    assert all(near(fused_gradients[name], one, 2 * CLOSE) for name, one in plain_gradients.items())


class MaskedDropout(nn.Module):
    """Dropout with given masks, for the plain path to drop what the kernels drop."""

    def __init__(self, masks: Iterator[Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.masks).reshape(x.shape)


def test_dropout_drops_the_same_forward_and_backward(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own masks, read off a kernel, given to the plain path: values and gradients agree."""
    from vitrail.models.fused.norm import AddNorm

    model, images = small(dropout=0.25, depth=2), torch.randn(2, 3, 48, 48, device=DEVICE)
    model.dropout.p = 0.0  # that after the positions is torch's own in both
    seeds = [[torch.tensor(1234567 * (3 * block + n + 1), device=DEVICE) for n in range(3)] for block in range(2)]
    monkeypatch.setattr(encoder, "_seeds", lambda blocks, x: seeds)

    def mask(seed: Tensor, tokens: int, width: int) -> Tensor:
        zeros, ones = torch.zeros(2, tokens, width, device=DEVICE), torch.ones(2, tokens, width, device=DEVICE)
        kept, _ = AddNorm.apply(zeros, ones, torch.zeros(width, device=DEVICE), None, seed, 0.25, 1e-6, torch.float32)
        return kept  # type: ignore[no-any-return]

    fused, fused_gradients = results(model, images, "auto")
    sizes = ((10, 192), (10, 768), (10, 192)), ((1, 192), (1, 768), (1, 192))  # of the last block only one token
    masks = [mask(seed, *size) for row, shapes in zip(seeds, sizes, strict=True) for seed, size in zip(row, shapes, strict=True)]
    assert 0.7 < float(torch.cat([one.flatten() for one in masks]).count_nonzero()) / sum(one.numel() for one in masks) < 0.8
    source = iter(masks)
    for block in model.blocks:
        block.dropout = block.mlp.dropout = MaskedDropout(source)
    plain, plain_gradients = results(model, images, "plain")
    assert near(fused, plain)
    assert all(near(fused_gradients[name], one, 2 * CLOSE) for name, one in plain_gradients.items())


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


def test_nothing_is_dropped_in_eval_mode(fusing: None) -> None:
    model, images = small(dropout=0.5).eval(), torch.randn(2, 3, 48, 48, device=DEVICE)
    assert near(results(model, images, "auto")[0], results(model, images, "plain")[0])


def test_stochastic_depth_keeps_the_mean() -> None:
    block = small(stochastic_depth=0.5).blocks[-1]
    kept = encoder._keep(block, torch.zeros(10_000, 1, device=DEVICE))  # type: ignore[arg-type]
    assert kept is not None and set(kept.unique().tolist()) == {0.0, 2.0} and abs(float(kept.mean()) - 1) < 0.1
    assert encoder._keep(block.eval(), torch.zeros(4, 1)) is None  # type: ignore[arg-type]


def test_many_tokens_go_to_the_library(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import attention_backward, branches

    monkeypatch.setattr(attention_backward, "MOST_TOKENS", 4)
    monkeypatch.setattr(branches, "AttentionBranch", None)
    model, images = small(), torch.randn(2, 3, 48, 48, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    fused, fused_gradients = results(model, images, "auto")
    assert near(fused, plain)
    assert all(near(fused_gradients[name], one, 2 * CLOSE) for name, one in plain_gradients.items())


def test_older_gpus_use_the_librarys_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import attention_backward

    here = torch.device(DEVICE)
    assert attention_backward.fits(197, 64, here) and not attention_backward.fits(257, 64, here)
    assert not attention_backward.fits(197, 80, here)
    for number, expected in ((8, False), (10, True), (12, False)):
        monkeypatch.setattr(attention_backward, "generation", lambda device, number=number: number)
        assert attention_backward.fits(197, 64, here) == expected
    monkeypatch.setattr(attention_backward, "generation", lambda device: 9)
    monkeypatch.setattr(attention_backward, "shared_memory", lambda device: 101_376)
    assert not attention_backward.fits(197, 64, here) and attention_backward.fits(50, 64, here)


@pytest.mark.parametrize("keeps", ["nothing", "products"])
def test_recomputed_blocks_give_the_same(keeps: Any, fusing: None) -> None:
    model, images = small(depth=2, dropout=0.2, stochastic_depth=0.2), torch.randn(2, 3, 48, 48, device=DEVICE)
    _, kept = results(model, images, "auto")
    model.checkpoint_activations(2, keeps)
    _, recomputed = results(model, images, "auto")
    assert all(near(recomputed[name], one, 1e-6) for name, one in kept.items())


def test_weights_without_gradients_may_be_frozen(fusing: None) -> None:
    model, images = small(), torch.randn(2, 3, 48, 48, device=DEVICE)
    _, whole = results(model, images, "auto")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    _, frozen = results(model, images, "auto")
    assert set(frozen) == {"head.weight", "head.bias"}
    assert all(near(frozen[name], whole[name], 1e-6) for name in frozen)


def test_a_frozen_block_between_others(fusing: None) -> None:
    model, images = small(qkv_bias=False), torch.randn(2, 3, 48, 48, device=DEVICE)
    model.blocks[1].requires_grad_(False)
    _, plain = results(model, images, "plain")
    _, fused = results(model, images, "auto")
    assert fused.keys() == plain.keys() and not any(name.startswith("blocks.1.") for name in fused)
    assert all(near(fused[name], one, 2 * CLOSE) for name, one in plain.items())


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 256), st.integers(1, 3), st.sampled_from([16, 32]), st.booleans(), st.randoms())
def test_attention_gradients(images: int, tokens: int, heads: int, channels: int, few: bool, random: Any) -> None:
    from vitrail.models.fused.attention_backward import attention_backward
    from vitrail.models.fused.attention_forward import attention

    torch.manual_seed(random.randint(0, 10_000))
    width, queries = heads * channels, 1 if few else tokens
    kv = torch.randn(images, tokens, 2 * width, device=DEVICE, dtype=LOW, requires_grad=True)
    q = torch.randn(images, queries, width, device=DEVICE, dtype=LOW, requires_grad=True)
    split = [one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, *kv.chunk(2, -1))]
    expected = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
    slope = torch.randn_like(expected)
    dq, dkv = torch.autograd.grad(expected, (q, kv), slope)
    with torch.no_grad():
        parts = (q, *kv.chunk(2, -1))
        out, lse = attention(*parts, heads)
        found_q, found_kv = torch.full_like(q, torch.nan), torch.full_like(kv, torch.nan)
        sums = attention_backward(*parts, out, slope, lse, heads, (found_q, *found_kv.chunk(2, -1)))
    assert near(out, expected) and near(found_q, dq, 3 * CLOSE) and near(found_kv, dkv, 3 * CLOSE)
    assert near(sums, torch.cat([dq.sum(1), dkv.sum(1)], -1), 10 * CLOSE)


@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_to_seven_digits(tanh: bool) -> None:
    from vitrail.models.fused.gelu import gelu, gelu_backward

    h = torch.linspace(-12, 12, 3 * 700, device=DEVICE).reshape(3, 700)
    slope = torch.randn_like(h)
    bias = torch.linspace(-0.5, 0.5, 700, device=DEVICE)
    exact = (h + bias).double().requires_grad_()
    value = F.gelu(exact, approximate="tanh" if tanh else "none")
    (expected,) = torch.autograd.grad(value, exact, slope.double())
    dh, sums, again = gelu_backward(h, bias, slope, tanh)
    assert (gelu(h, bias, tanh) - value).abs().max() < 2e-6 and torch.equal(again, gelu(h, bias, tanh))
    assert (dh - expected).abs().max() < 5e-6 and (sums - expected.sum(0)).abs().max() < 1e-5


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("rows, inner, columns", [(1, 64, 128), (300, 64, 256), (129, 192, 384)])
def test_gelu_in_the_ends_of_products(tanh: bool, rows: int, inner: int, columns: int) -> None:
    from vitrail.models.fused.back_gelu import back_gelu
    from vitrail.models.fused.up_gelu import up_gelu

    y, up = torch.randn(rows, inner, device=DEVICE).to(LOW), torch.randn(columns, inner, device=DEVICE).to(LOW) / 4
    bias, down = torch.linspace(-9, 9, columns, device=DEVICE), torch.randn(inner, columns, device=DEVICE).to(LOW) / 4
    entering = F.linear(y.double(), up.double(), bias.double()).requires_grad_()
    value = F.gelu(entering, approximate="tanh" if tanh else "none")
    (derivative,) = torch.autograd.grad(value.sum(), entering)
    slope = torch.full((rows, columns), torch.nan, device=DEVICE, dtype=LOW)

    def off(found: Tensor, exact: Tensor) -> float:
        """By how much it is off beyond what rounding to bfloat16 does."""
        exact, rounding = exact.detach(), 2**-8 if DEVICE == "cuda" else 0
        return float(((found - exact).abs() - rounding * exact.abs()).max())

    assert off(up_gelu(y, up, bias, tanh), value) < 2e-5
    assert off(up_gelu(y, up, bias, tanh, slope=slope), value) < 2e-5
    assert off(slope, derivative) < 5e-5
    dhidden, dbias = back_gelu(y, down, slope)
    expected = (y.double() @ down.double()) * slope.double()
    assert near(dhidden, expected) and near(dbias, expected.sum(0))


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_a_model_with_gelu_in_the_ends_of_products(gelu: str, fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import back_gelu, branches, up_gelu

    taken: list[str] = []
    forward, backward = up_gelu.up_gelu, back_gelu.back_gelu

    def watched(*given: Any, slope: Tensor | None) -> Tensor:
        taken.append("value" if slope is None else "both")
        return forward(*given, slope=slope)

    def watched_back(*given: Any) -> tuple[Tensor, Tensor]:
        taken.append("back")
        return backward(*given)

    model, images = small(depth=2, gelu=gelu), torch.randn(2, 3, 48, 48, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    monkeypatch.setattr(branches, "suits", lambda y, width: True)
    monkeypatch.setattr(branches, "up_gelu", watched)
    monkeypatch.setattr(branches, "back_gelu", watched_back)
    fused, gradients = results(model, images, "auto")
    assert taken == ["both", "both", "back", "back"] and near(fused, plain, 1e-4 + CLOSE)
    assert all(near(gradients[name], one, 1e-4 + 2 * CLOSE) for name, one in plain_gradients.items())
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        assert near(model(images), plain, 1e-4 + CLOSE)
    assert taken[4:] == ["value", "value"]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows, columns", [(1, 16), (30, 200), (70, 300)])
def test_a_norms_weights_taken_into_a_product(rows: int, columns: int, has_bias: bool) -> None:
    from vitrail.models.fused.folding import fold, unfold

    weight, scale, shift = (torch.randn(size, device=DEVICE) for size in ((rows, columns), (columns,), (columns,)))
    bias = torch.randn(rows, device=DEVICE) if has_bias else None
    leaves = [one.double().requires_grad_() for one in (weight, scale, shift)]
    folded, offset = leaves[0] * leaves[1], leaves[0] @ leaves[2]
    slopes = torch.randn(rows, columns, device=DEVICE), torch.randn(rows, device=DEVICE)
    expected = torch.autograd.grad((folded, offset), leaves, [one.double() for one in slopes])
    found = fold(weight, bias, scale, shift, torch.float32)
    assert near(found[0], folded, 1e-6)
    assert found[1] is not None and near(found[1], offset if bias is None else offset + bias, 1e-6)
    for one, two in zip(unfold(slopes[0].clone(), slopes[1], weight, scale, shift), expected, strict=True):
        assert one is not None and near(one, two, 2e-6)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 2), st.integers(1, 300), st.integers(1, 2), st.sampled_from([16, 32]), st.booleans(), st.randoms())
def test_attention_over_few_tokens(images: int, tokens: int, heads: int, channels: int, few: bool, random: Any) -> None:
    from vitrail.models.fused.attention_forward import attention, cover

    torch.manual_seed(random.randint(0, 10_000))
    width = heads * channels
    q, k, v = torch.randn(images, tokens, 3 * width, device=DEVICE, dtype=LOW).chunk(3, -1)
    q = 3 * (q[:, :1].contiguous() if few else q)
    split = [one.unflatten(-1, (heads, -1)).transpose(1, 2).double() for one in (q, k, v)]
    scores = split[0] @ split[1].transpose(-1, -2) * channels**-0.5
    for together in (True, False):
        out, lse = attention(q, k, v, heads, together=together)
        assert near(out, (scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2)) and near(lse, scores.logsumexp(-1))
    assert sum(cover(tokens)) >= tokens and all(part == 0 or part.bit_count() == 1 for part in cover(tokens))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3), st.sampled_from([8, 24, 200]), st.randoms())
def test_assembled_input(images: int, patches: int, prefix: int, width: int, random: Any) -> None:
    from vitrail.models.fused.assembling import Assembled

    torch.manual_seed(random.randint(0, 10_000))
    given_patches = torch.randn(images, patches, width, device=DEVICE).to(LOW).requires_grad_()
    fixed = torch.randn(prefix + patches, width, device=DEVICE, requires_grad=True)
    expected = fixed + F.pad(given_patches.float(), (0, 0, prefix, 0))
    slope = torch.randn_like(expected)
    found = Assembled.apply(given_patches, fixed)
    assert found.dtype == torch.float32 and near(found, expected, 1e-6)
    for one, two in zip(*(torch.autograd.grad(way, (given_patches, fixed), slope) for way in (found, expected)), strict=True):
        assert one.dtype == two.dtype and near(one, two, 1e-5 if DEVICE == "cpu" else CLOSE)


@pytest.mark.parametrize("shape", [(1, 5), (300, 3, 24), (1056, 700)])
def test_partial_sums(shape: tuple[int, ...]) -> None:
    from vitrail.models.fused.sums import added_up

    parts = torch.randn(shape, device=DEVICE)
    assert (added_up(parts, torch.float32) - parts.double().sum(0)).abs().max() < 1e-4
    assert added_up(parts, torch.bfloat16).dtype == torch.bfloat16 and added_up(parts, torch.float32).shape == shape[1:]


@pytest.mark.parametrize("name", ["gelu", "gelu_eight", "gelu_backward"])
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
    slopes = torch.randn(rows, device=DEVICE)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected, logits, slopes.double())
    losses = CrossEntropy.apply(logits, targets)
    (found,) = torch.autograd.grad(losses, logits, slopes)
    assert (losses - expected).abs().max() < 3e-5 and (found - gradient).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["masked-patch", "masked-autoencoder"])
def test_learning_without_labels_goes_the_same_way(kind: str, fusing: None) -> None:
    encoder_part = small(outputs=0)
    made = {"masked-patch": MaskedPatches, "masked-autoencoder": partial(MaskedAutoencoder, width=64, depth=2)}[kind]
    whole = randomise(made(encoder_part, 12)).train().to(DEVICE)
    assert isinstance(whole, Pretraining)
    images = torch.randn(2, 3, 48, 48, device=DEVICE)
    noise = torch.rand(2, whole.patches, whole.draws, device=DEVICE)
    found = []
    for kernels in ("plain", "auto"):
        encoder_part.kernels = kernels  # type: ignore[assignment]
        whole.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            predicted, places = whole(images, noise)
        (predicted.float() * torch.linspace(-1, 1, 12, device=DEVICE)).sum().backward()
        found.append((predicted, places, {name: one.grad for name, one in whole.named_parameters()}))
    (plain, at_plain, plain_gradients), (fused, at_fused, fused_gradients) = found
    assert torch.equal(at_plain, at_fused) and near(fused, plain)
    for name, gradient in plain_gradients.items():
        assert (gradient is None) == (fused_gradients[name] is None), name
        assert gradient is None or near(fused_gradients[name], gradient, 2 * CLOSE), name


def test_norm_of_a_stream_far_from_zero() -> None:
    """Two passes over the row, not the difference of two large sums."""
    x = 1000 + torch.randn(2, 5, 24, device=DEVICE)
    norm = nn.LayerNorm(24, eps=1e-6).to(DEVICE)
    _, y = encoder.add_norm(encoder.Stream(x), norm, torch.float32)
    exact = F.layer_norm(x.double(), (24,), eps=1e-6)
    assert (y - exact).abs().max() < 5e-4  # the inputs themselves are only that fine


@pytest.mark.parametrize(
    "change",
    [{"attention_dropout": 0.1}, {"layer_scale": 1e-4}, {"attention": "axial"}, {"position": "relative"}],
    ids=lambda change: next(iter(change)),
)
def test_what_kernels_do_not_know_is_left_to_the_plain_path(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "is_fake", lambda x: True)  # stands for a GPU: the question is only asked
    x = torch.zeros(1, 10, 192, dtype=torch.bfloat16)
    assert small()._can_fuse(x)
    assert not small(**change)._can_fuse(x)


def test_somebody_who_listens_to_a_part_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "is_fake", lambda x: True)
    model, x = small(), torch.zeros(1, 10, 192, dtype=torch.bfloat16)
    handle = model.blocks[1].mlp.register_forward_hook(lambda *_: None)
    assert not model._can_fuse(x)
    handle.remove()
    assert model._can_fuse(x)


def test_processors_and_float32_go_the_plain_way() -> None:
    model = small()
    assert not model._can_fuse(torch.zeros(1, 10, 192))
    if DEVICE == "cpu":
        assert not model._can_fuse(torch.zeros(1, 10, 192, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "queries, keys, heads, channels", [(1, 1, 2, 16), (5, 5, 1, 32), (1, 70, 2, 16), (197, 197, 1, 16), (65, 65, 3, 16)]
)
def test_attention_is_tried_for_every_length(
    queries: int, keys: int, heads: int, channels: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vitrail.models.fused import attention_backward, checking

    low = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    size = torch.device(DEVICE), low, queries, keys, heads, channels
    checking.attention_works.cache_clear()
    assert checking.attention_works(*size, True) and not caplog.records
    real = attention_backward.attention_backward

    def wrong(factor: float, *given: Any) -> Tensor:
        sums = real(*given)
        given[-1][2][:, -1] *= factor  # the last value's gradient
        return sums

    for factor in (3.0, torch.nan):
        monkeypatch.setattr(attention_backward, "attention_backward", partial(wrong, factor))
        caplog.clear()
        checking.attention_works.cache_clear()
        assert not checking.attention_works(*size, True) and checking.attention_works(*size, False)
        assert f"over {keys} tokens is not used here (they are off by" in caplog.text
    checking.attention_works.cache_clear()


def test_kernels_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that computes something else is noticed, and said; generators stay as they were."""
    from vitrail.models.fused import branches, checking

    checking.works.cache_clear()
    device, before = torch.device(DEVICE), torch.random.get_rng_state()
    low = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter takes bfloat16's bits for whole numbers
    assert checking.works(device, low) and torch.equal(torch.random.get_rng_state(), before)
    assert not caplog.records
    real = branches.gelu
    monkeypatch.setattr(branches, "gelu", lambda *given: 1.2 * real(*given))
    checking.works.cache_clear()
    assert not checking.works(device, low)
    monkeypatch.setattr(branches, "gelu", None)
    checking.works.cache_clear()
    assert not checking.works(device, low)
    checking.works.cache_clear()
    assert "off by" in caplog.text and "TypeError" in caplog.text and "more slowly" in caplog.text
