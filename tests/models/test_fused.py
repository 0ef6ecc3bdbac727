"""The fused kernels compute what the plain blocks do, forward and backward.

Without a GPU they run in Triton's interpreter (tests/conftest.py switches it on), in float32 and to float32's accuracy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.other_libraries import randomise
from vitrail.models import ViT, create_model
from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.fused import dispatch, encoder, self_test
from vitrail.models.masked import MaskedPatches, Pretraining

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if torch.cuda.is_available() else torch.float32
CLOSE = 3e-2 if torch.cuda.is_available() else 3e-6  # of the largest value
WIDTH, MLP = (192, 768) if torch.cuda.is_available() else (48, 80)  # the interpreter takes long for more; none fills its tiles


def near(a: Tensor, b: Tensor, tolerance: float = CLOSE) -> bool:
    scale = max(float(b.detach().abs().max()), 0.3)
    return bool((a.detach().float() - b.detach().float()).abs().max() <= tolerance * scale)


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fused kernels wherever the whitelist allows them, though this may be a CPU and float32."""
    if DEVICE == "cuda":  # self-tests run now, and not in the middle of a test that has replaced a part of them
        assert dispatch.can_fuse(torch.zeros(1, 4, 64, device=DEVICE, dtype=LOW))
    else:
        monkeypatch.setattr(encoder, "matmul_dtype", lambda x: LOW)
        monkeypatch.setattr(dispatch, "_kernels_run", lambda x, dtype: True)
        monkeypatch.setattr(dispatch, "_block_runs", lambda shape, x, dtype: True)
        monkeypatch.setattr(self_test, "attention_works", lambda *given: True)
    yield


@pytest.fixture
def blocks_fused(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The blocks that ran fused, in order."""
    seen: list[nn.Module] = []
    real = encoder.run_block

    def watched(block: Any, *given: Any) -> Any:
        seen.append(block)
        return real(block, *given)

    monkeypatch.setattr(encoder, "run_block", watched)
    return seen


def small(**changes: Any) -> ViT:
    changes = {"image_size": 48, "depth": 3, "outputs": 7, "heads": 3, "width": WIDTH, "mlp": MLP, **changes}
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
    "qk norm": {"qk_norm": True},
    "qk norm, no bias, mean": {"qk_norm": True, "qkv_bias": False, "pooling": "mean", "heads": 6},
    "wide heads": {"heads": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_plain_ones(case: str, fusing: None) -> None:
    model, images = small(**CASES[case]), torch.randn(2, 3, 48, 48, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    fused, fused_gradients = results(model, images, "auto")
    assert near(fused, plain)
    assert fused_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert near(fused_gradients[name], gradient, 2 * CLOSE), name


@pytest.mark.slow
def test_the_fused_path_is_really_used(fusing: None, blocks_fused: list[nn.Module]) -> None:
    model = small()
    results(model, torch.randn(1, 3, 48, 48, device=DEVICE), "auto")
    assert blocks_fused == list(model.blocks)
    results(model, torch.randn(1, 3, 48, 48, device=DEVICE), "plain")
    assert len(blocks_fused) == 3


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"registers": 2, "position_prefix": False}, {"position_at": "every-layer"}], ids=str)
def test_images_of_another_size_get_their_own_positions(
    fields: dict[str, Any], fusing: None, blocks_fused: list[nn.Module]
) -> None:
    """As many tokens as the model's own size has, so that its table would fit: the kernel must not take it."""
    model, images = small(any_size=True, position_std=1.0, **fields), torch.randn(2, 3, 16, 144, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    fused, fused_gradients = results(model, images, "auto")
    assert bool(blocks_fused) == (not fields or "registers" in fields)
    assert near(fused, plain)
    assert all(near(fused_gradients[name], one, 2 * CLOSE) for name, one in plain_gradients.items())
    with torch.no_grad():
        resized = copy.deepcopy(model).resize((16, 144))
        assert near(fused, resized(images))


@pytest.mark.slow
def test_stochastic_depth_drops_the_same_branches(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = [torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0]), torch.tensor([1.5, 1.0])] * 2
    model, images = small(stochastic_depth=0.5), torch.randn(2, 3, 48, 48, device=DEVICE)
    drawn = iter(factors)
    with monkeypatch.context() as patched:
        for block in model.blocks:
            patched.setattr(block.skip, "forward", lambda x: x * next(drawn).to(x)[:, None, None])
        plain, plain_gradients = results(model, images, "plain")
    for block in model.blocks:
        vars(block.skip).pop("forward", None)  # what the context put back there is the class's own
    drawn = iter(factors)
    monkeypatch.setattr(encoder, "_draw_drop_path_scales", lambda rate, x: (next(drawn).to(DEVICE), next(drawn).to(DEVICE)))
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


@pytest.mark.slow
def test_dropout_drops_the_same_forward_and_backward(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own masks, read off a kernel, given to the plain path: values and gradients agree, with a rate of its own for
    every dropout and an epsilon of its own for every norm."""
    from vitrail.models.fused.residual_norm import residual_norm

    model, images = small(dropout=0.25, depth=2, qk_norm=True), torch.randn(2, 3, 48, 48, device=DEVICE)
    model.dropout.p = 0.0  # that after the positions is torch's own in both
    for number, norm in enumerate(module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        norm.eps = 0.1 + 0.2 * number
    for block in model.blocks:
        block.attention.k_norm.eps = block.attention.q_norm.eps
    for block, rates in zip(model.blocks, ((0.1, 0.5), (0.4, 0.2)), strict=True):
        block.dropout.p, block.mlp.dropout.p = rates
    seeds = [[torch.tensor(1234567 * (3 * block + n + 1), device=DEVICE) for n in range(3)] for block in range(2)]
    drawn = iter(seeds)
    monkeypatch.setattr(encoder, "draw_noise", lambda block, x: encoder.BlockOptions(seeds=tuple(next(drawn))))

    def mask(seed: Tensor, tokens: int, width: int, rate: float) -> Tensor:
        zeros, ones = torch.zeros(2, tokens, width, device=DEVICE), torch.ones(2, tokens, width, device=DEVICE)
        kept, _ = residual_norm(zeros, ones, torch.zeros(width, device=DEVICE), None, seed, rate, 1e-6, torch.float32)
        assert abs(float((kept == 0).float().mean()) - rate) < 0.15  # of as few as 96 values
        return kept  # type: ignore[no-any-return]

    fused, fused_gradients = results(model, images, "auto")
    sizes = ((10, WIDTH), (10, MLP), (10, WIDTH)), ((1, WIDTH), (1, MLP), (1, WIDTH))  # of the last block only one token
    masks = [
        mask(seed, *size, rate)
        for block, row, shapes in zip(model.blocks, seeds, sizes, strict=True)
        for seed, size, rate in zip(row, shapes, (block.dropout.p, block.mlp.dropout.p, block.mlp.dropout.p), strict=True)
    ]
    source = iter(masks)
    for block in model.blocks:
        block.dropout = block.mlp.dropout = MaskedDropout(source)
    plain, plain_gradients = results(model, images, "plain")
    assert near(fused, plain)
    assert all(near(fused_gradients[name], one, 2 * CLOSE) for name, one in plain_gradients.items())


@pytest.mark.slow
def test_nothing_is_dropped_in_eval_mode(fusing: None) -> None:
    model, images = small(dropout=0.5).eval(), torch.randn(2, 3, 48, 48, device=DEVICE)
    assert near(results(model, images, "auto")[0], results(model, images, "plain")[0])


def test_stochastic_depth_keeps_the_mean() -> None:
    block = small(stochastic_depth=0.5).blocks[-1]
    scales = encoder.draw_noise(block, torch.zeros(10_000, 1, device=DEVICE)).drop_path_scales  # type: ignore[arg-type]
    assert scales is not None
    for one in scales:
        assert set(one.unique().tolist()) == {0.0, 2.0} and abs(float(one.mean()) - 1) < 0.1
    assert not torch.equal(*scales)
    assert encoder.draw_noise(block.eval(), torch.zeros(4, 1)).drop_path_scales is None  # type: ignore[arg-type]


@pytest.mark.slow
def test_many_tokens_use_torchs_attention(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import attention_backward, branches

    monkeypatch.setattr(attention_backward, "MAX_TOKENS", 4)
    monkeypatch.setattr(branches, "attention_branch", None)
    model, images = small(), torch.randn(2, 3, 48, 48, device=DEVICE)
    plain, plain_gradients = results(model, images, "plain")
    fused, fused_gradients = results(model, images, "auto")
    assert near(fused, plain)
    assert all(near(fused_gradients[name], one, 2 * CLOSE) for name, one in plain_gradients.items())


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
def test_recomputed_blocks_give_the_same(keep: Any, fusing: None) -> None:
    model, images = small(depth=2, dropout=0.2, stochastic_depth=0.2), torch.randn(2, 3, 48, 48, device=DEVICE)
    _, kept = results(model, images, "auto")
    model.checkpoint_activations(2, keep)
    _, recomputed = results(model, images, "auto")
    assert all(near(recomputed[name], one, 1e-6) for name, one in kept.items())


@pytest.mark.slow
def test_weights_without_gradients_may_be_frozen(fusing: None) -> None:
    model, images = small(), torch.randn(2, 3, 48, 48, device=DEVICE)
    _, whole = results(model, images, "auto")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    _, frozen = results(model, images, "auto")
    assert set(frozen) == {"head.weight", "head.bias"}
    assert all(near(frozen[name], whole[name], 1e-6) for name in frozen)


@pytest.mark.slow
def test_a_frozen_block_between_others(fusing: None) -> None:
    model, images = small(qkv_bias=False), torch.randn(2, 3, 48, 48, device=DEVICE)
    model.blocks[1].requires_grad_(False)
    _, plain = results(model, images, "plain")
    _, fused = results(model, images, "auto")
    assert fused.keys() == plain.keys() and not any(name.startswith("blocks.1.") for name in fused)
    assert all(near(fused[name], one, 2 * CLOSE) for name, one in plain.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [("norm1", "norm2"), ("qkv.weight", "down.weight"), ("bias",), ("attention", "patches", "class_token")]
)
def test_parts_of_blocks_may_be_frozen(parts: tuple[str, ...], fusing: None) -> None:
    model, images = small(), torch.randn(2, 3, 48, 48, device=DEVICE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))
    _, plain = results(model, images, "plain")
    _, fused = results(model, images, "auto")
    assert fused.keys() == plain.keys() and not any(part in name for name in fused for part in parts)
    assert all(near(fused[name], one, 2 * CLOSE) for name, one in plain.items())


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "change",
    [{"attention_dropout": 0.1}, {"layer_scale": 1e-4}, {"attention": "axial"}, {"position": "relative"}],
    ids=lambda change: next(iter(change)),
)
def test_what_kernels_do_not_know_takes_the_plain_path(change: dict[str, Any], fusing: None, blocks_fused: list[nn.Module]) -> None:
    model, images = small(**change), torch.randn(1, 3, 48, 48, device=DEVICE)
    results(model, images, "auto")
    assert not blocks_fused and not dispatch.is_fusable(model)


def test_a_block_needs_the_self_test_of_its_own_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(self_test, "works", lambda *given: bool(asked.append(given)) or True)
    block = create_model("ViT-Ti/16", outputs=0, image_size=32, width=64, depth=1, heads=2, mlp=96).blocks[0]
    x = torch.zeros(1, 4, 64)
    assert dispatch.fuses_block(block, x, torch.bfloat16, uses_autocast=True)
    assert asked == [(x.device, torch.bfloat16, 64, 96, 2, True, False)]


def test_cpus_and_float32_take_the_plain_path() -> None:
    assert not dispatch.can_fuse(torch.zeros(1, 10, 192))
    if DEVICE == "cpu":
        assert not dispatch.can_fuse(torch.zeros(1, 10, 192, dtype=torch.bfloat16))
