"""Layer norms of queries and keys: the plain path, the kernels against float64, and models in which they are not quite plain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.accuracy import FLOAT32, is_accurate
from tests.models.other_libraries import randomise
from tests.models.test_fused import CLOSE, DEVICE, LOW, blocks_fused, fusing, near, results
from tests.models.test_whitelist import RmsNorm, becomes, images, logits, patch_forward, strided, tiny, without_bias
from vitrail.models import ViT, create_model
from vitrail.models.autoencoder import MaskedAutoencoder
from vitrail.models.fused import self_test, self_test_cases, whitelist

__all__ = ["blocks_fused", "fusing", "images"]


# The plain path


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return unit * norm.weight.double() + norm.bias.double()


@pytest.mark.parametrize("attention", ["full", "axial"])
def test_attention_maps_are_of_normalised_queries_and_keys(attention: Any, images: Tensor) -> None:
    model = tiny(qk_norm=True, attention=attention).eval()
    block = model.blocks[0]
    (_, weights), *_ = model.attention(images, layers=[0])
    with torch.no_grad():
        x = block.norm1(model.add_prefix_and_positions(model.embed_patches(images)))
        q, k, v = block.attention.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        scores = normed(q, block.attention.q_norm) @ normed(k, block.attention.k_norm).mT / 4
        if attention == "axial":
            scores = scores.masked_fill(~block.attention.neighbourhood(x.device), float("-inf"))
        assert near(weights, scores.softmax(-1), 3e-6)
        assert near(block.attention(x), block.attention._merge((scores.softmax(-1) @ v.double()).float()), 3e-6)
        assert near(block.attention(x, num_queries=1), block.attention(x)[:, :1], 3e-6)


def test_gradients_by_attention_are_those_of_autograd(images: Tensor) -> None:
    model = tiny(qk_norm=True, depth=2).eval()
    outputs = torch.tensor([1, 3], device=DEVICE)
    layers = list(model.attention_gradients(images, outputs))[1:]
    assert [number for number, _, _ in layers] == [1, 0]
    x = model.add_prefix_and_positions(model.embed_patches(images))
    kept = []
    for block in model.blocks:
        x, weights = block.with_attention(x)
        kept.append(weights)
    total = model.logits(model.norm(x)).gather(1, outputs[:, None]).sum()
    for (_, _, found), expected in zip(layers, reversed(torch.autograd.grad(total, kept)), strict=True):
        assert found is not None and near(found, expected, 1e-5)


def test_scores_do_not_grow_with_the_weights(images: Tensor) -> None:
    """That is what it is for."""
    small, large = tiny(qk_norm=True).eval(), tiny(qk_norm=True).eval()
    for block in large.blocks:
        block.attention.qkv.weight.data[:64] *= 100
        block.attention.qkv.bias.data[:64] *= 100
    assert near(large(images), small(images), 1e-4)


@pytest.mark.parametrize("init", ["paper", "small"])
def test_norms_begin_as_ones_and_zeros(init: Any) -> None:
    model = create_model("ViT-S/8", image_size=16, depth=1, init=init, qk_norm=True, seed=0)
    twin = create_model("ViT-S/8", image_size=16, depth=1, init=init, seed=0)
    attention = model.blocks[0].attention  # type: ignore[union-attr]
    for norm in (attention.q_norm, attention.k_norm):
        assert norm.weight.shape == (64,) and (norm.weight == 1).all() and (norm.bias == 0).all() and norm.eps == 1e-6
    values = model.state_dict()
    assert all(torch.equal(values[name], one) for name, one in twin.state_dict().items())


def test_bf16_under_autocast_on_a_cpu() -> None:
    model = create_model("ViT-S/8", image_size=32, depth=2, width=64, heads=2, mlp=64, outputs=5, qk_norm=True, seed=0)
    randomise(model).train()
    batch = torch.randn(4, 3, 32, 32)
    found = {}
    for low in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            q, k, v = model.blocks[0].attention._split(torch.randn(1, 3, 64))  # type: ignore[union-attr]
            assert q.dtype == k.dtype == v.dtype == (torch.bfloat16 if low else torch.float32)
            out = model(batch)
        out.square().sum().backward()
        found[low] = [out, *(one.grad for one in model.parameters())]
    assert all(near(one, two, 0.06) for one, two in zip(found[True], found[False], strict=True))


def test_the_pooling_has_none() -> None:
    """As in timm, where the option is the blocks'."""
    names = [name for name, _ in create_model("ViT-S/16", pooling="map", qk_norm=True, device="meta").named_parameters()]
    assert sum("q_norm" in name for name in names) == 24 and not any(
        name.startswith("pool.") and "q_norm" in name for name in names
    )


# The kernels


def head_norms(channels: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [one + 0.3 * torch.randn(channels, device=DEVICE) for one in (1.0, 0.2, 1.0, 0.5)]


def exactly(q: Tensor, kv: Tensor, norms: list[Tensor], heads: int, grad_out: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = [one.detach().to(dtype).requires_grad_() for one in (q, kv, *norms)]
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    heads_of = [one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (leaves[0], *leaves[1].chunk(2, -1))]
    shape = heads_of[0].shape[-1:]
    for part, (weight, bias) in enumerate((leaves[2:4], leaves[4:6])):
        heads_of[part] = F.layer_norm(heads_of[part].to(kind), shape, weight.to(kind), bias.to(kind), 1e-6).to(dtype)
    value = F.scaled_dot_product_attention(*heads_of).transpose(1, 2).flatten(2)
    dq, dkv, *dnorms = torch.autograd.grad(value, leaves, grad_out.to(dtype))
    return value, dq, dkv, torch.cat([dq.sum(1), dkv.sum(1)], -1), torch.stack(dnorms)


@pytest.mark.parametrize(
    ("tokens", "channels", "few"),
    [
        (17, 16, False),
        (64, 32, False),
        (65, 16, True),
        *(
            pytest.param(*size, marks=pytest.mark.slow)
            for size in ((1, 16, False), (65, 64, False), (197, 16, False), (250, 32, True))
        ),
    ],
)
def test_attention_kernels_against_float64(tokens: int, channels: int, few: bool) -> None:
    from vitrail.models.fused.attention_backward import attention_backward
    from vitrail.models.fused.attention_forward import attention_forward

    heads, queries = 2, 2 if few else tokens
    norms, width = head_norms(channels), heads * channels
    q = (0.5 + 2 * torch.randn(2, queries, width, device=DEVICE)).to(LOW)
    kv = (torch.randn(2, tokens, 2 * width, device=DEVICE) - 0.3).to(LOW)
    grad_out = torch.randn(2, queries, width, device=DEVICE).to(LOW)
    rounded, exact = (exactly(q, kv, norms, heads, grad_out, dtype) for dtype in (LOW, torch.float64))
    for whole_heads in (True, False):
        out, lse = attention_forward(q, kv, heads, norms, 1e-6, whole_heads)
        dq, dkv, sums, dnorms = attention_backward(q, kv, out, grad_out, lse, heads, norms, 1e-6)
        for found, theirs, truth in zip((out, dq, dkv, sums, dnorms), rounded, exact, strict=True):
            assert is_accurate(found, theirs, truth, 20 * FLOAT32)
        if not few:
            together, none, same, again = attention_backward(torch.cat([q, kv], -1), None, out, grad_out, lse, heads, norms, 1e-6)
            assert torch.equal(together, torch.cat([dq, dkv], -1)) and torch.equal(same, sums) and torch.equal(again, dnorms)
            assert not none.numel()
    assert (dnorms[3] == 0).all()  # softmax ignores what is added to all keys


@pytest.mark.parametrize(("rows", "heads", "channels"), [(3, 2, 12), (701, 3, 16), (90, 1, 80)])
def test_the_pass_for_many_tokens_against_float64(rows: int, heads: int, channels: int) -> None:
    from vitrail.models.fused.qk_norm import qk_norm

    norms = [one.requires_grad_() for one in head_norms(channels)]
    qkv = (0.5 + torch.randn(1, rows, 3 * heads * channels, device=DEVICE)).to(LOW).requires_grad_()
    grad_out = torch.randn(qkv.shape, device=DEVICE).to(LOW)

    def plainly(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = qkv.to(dtype).unflatten(-1, (3, heads, channels)).unbind(2)
        kind = torch.float32 if dtype == torch.bfloat16 else dtype
        q, k = (
            F.layer_norm(one.to(kind), (channels,), weight.to(kind), bias.to(kind), 1e-6).to(dtype)
            for one, (weight, bias) in ((q, norms[:2]), (k, norms[2:]))
        )
        out = torch.stack([q, k, v], 2).flatten(2)
        dqkv, *dnorms = torch.autograd.grad(out, [qkv, *norms], grad_out.to(dtype))
        return [out, dqkv, torch.stack(dnorms)]

    out = qk_norm(qkv, heads, norms, 1e-6)
    dqkv, *dnorms = torch.autograd.grad(out, [qkv, *norms], grad_out)
    assert torch.equal(out[..., 2 * heads * channels :], qkv[..., 2 * heads * channels :])
    rounded, exact = plainly(LOW), plainly(torch.float64)
    for found, theirs, truth in zip((out, dqkv, torch.stack(dnorms)), rounded, exact, strict=True):
        assert is_accurate(found, theirs, truth.double(), 10 * FLOAT32)


def close(model: ViT, images: Tensor) -> None:
    plain, plain_gradients = results(model, images, "plain")
    fused, gradients = results(model, images, "auto")
    assert near(fused, plain) and gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert near(gradients[name], gradient, 3 * CLOSE), name


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
def test_recomputed_blocks_give_the_same(keep: Any, images: Tensor, fusing: None) -> None:
    model = tiny(qk_norm=True, depth=2).train()
    _, kept = results(model, images, "auto")
    model.checkpoint_activations(2, keep)
    _, recomputed = results(model, images, "auto")
    assert all(near(recomputed[name], one, 1e-6) for name, one in kept.items())


@pytest.mark.slow
def test_many_tokens_use_torchs_attention(images: Tensor, fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import attention_backward, branches

    monkeypatch.setattr(attention_backward, "MAX_TOKENS", 4)
    monkeypatch.setattr(branches, "attention_branch", None)
    close(tiny(qk_norm=True).train(), images)


@pytest.mark.slow
def test_frozen_norms(images: Tensor, fusing: None) -> None:
    model = tiny(qk_norm=True).train()
    model.blocks[0].attention.q_norm.requires_grad_(False)
    model.blocks[1].attention.k_norm.weight.requires_grad_(False)
    model.blocks[2].attention.qkv.requires_grad_(False)
    close(model, images)


@pytest.mark.slow
def test_an_autoencoder_and_its_decoder(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    encoder = tiny(qk_norm=True, outputs=0, patch=8)
    whole = randomise(partial(MaskedAutoencoder, width=64, depth=2)(encoder, 12)).train().to(DEVICE)
    assert whole.decoder_blocks[0].attention.q_norm.weight.shape == (32,)
    noise, found = torch.rand(2, whole.patches, whole.draws, device=DEVICE), []
    for kernels in ("plain", "auto"):
        encoder.kernels = kernels  # type: ignore[assignment]
        whole.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            predicted, _ = whole(images, noise)
        predicted.float().square().sum().backward()
        found.append([predicted, *(one.grad for one in whole.parameters() if one.grad is not None)])
    assert len(blocks_fused) == 5 and all(near(one, two, 5 * CLOSE) for one, two in zip(*found, strict=True))


# The whitelist


CHANGES: dict[str, Callable[[Any], None]] = {
    "another norm class": lambda attention: setattr(attention, "q_norm", RmsNorm(attention.q_norm)),
    "a subclass": lambda attention: setattr(attention, "k_norm", becomes(type("Own", (nn.LayerNorm,), {}), attention.k_norm)),
    "no bias": lambda attention: setattr(attention, "q_norm", without_bias(attention.q_norm)),
    "another epsilon": lambda attention: setattr(attention.k_norm, "eps", 0.5),
    "strides": lambda attention: setattr(attention.q_norm, "weight", strided(attention.q_norm.weight)),
    "patched": lambda attention: patch_forward(attention.q_norm, 3.0),
    "none for queries": lambda attention: setattr(attention, "q_norm", None),
    "none at all": lambda attention: (setattr(attention, "q_norm", None), setattr(attention, "k_norm", None)),  # type: ignore[func-returns-value]
    "a function": lambda attention: (delattr(attention, "k_norm"), setattr(attention, "k_norm", lambda k: 2 * k)),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_norm_takes_the_plain_path(change: str, images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    model = tiny(qk_norm=True).eval()
    before = logits(model, images, "plain")
    CHANGES[change](model.blocks[1].attention)
    plain = logits(model, images, "plain")
    assert change == "a subclass" or not near(plain, before, CLOSE)
    assert near(logits(model, images, "auto"), plain) and blocks_fused == [model.blocks[0], model.blocks[2]]


def test_a_norm_in_a_model_without(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    model = tiny().eval()
    model.blocks[1].attention.q_norm = nn.LayerNorm(16, device=DEVICE)
    model.blocks[2].attention.k_norm = lambda k: 2 * k  # type: ignore[assignment]
    assert near(logits(model, images, "auto"), logits(model, images, "plain")) and blocks_fused == [model.blocks[0]]


def test_hooks_on_norms_are_called(images: Tensor, fusing: None, blocks_fused: list[nn.Module]) -> None:
    model, calls = tiny(qk_norm=True).eval(), []
    model.blocks[1].attention.k_norm.register_forward_hook(lambda *given: calls.append(1))
    logits(model, images, "auto")
    assert len(calls) == 1 and len(blocks_fused) == 2


def test_the_shape_that_is_tested_says_so() -> None:
    for qk_norm in (True, False):
        shape = whitelist.shape_of_block(tiny(qk_norm=qk_norm).blocks[0])
        assert shape == (32, 32, 2, True, qk_norm)


# The self-test


HERE = torch.device(DEVICE)


@pytest.mark.slow
def test_the_self_test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.models.fused import attention_backward

    assert self_test_cases.blocks_difference(HERE, LOW, 64, 96, 2, True, qk_norm=True) == 0
    assert self_test_cases.attention_difference(HERE, LOW, 17, 17, 2, 16, True, True) < 1e-2
    assert self_test_cases.attention_difference(HERE, LOW, 1, 9, 2, 16, True, True) < 1e-2
    monkeypatch.setattr(attention_backward, "MAX_TOKENS", 4)
    assert self_test_cases.blocks_difference(HERE, LOW, 48, 96, 2, False, qk_norm=True) == 0


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0, 2])
def test_the_self_test_sees_a_wrong_norm(wrong: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels that read another weight in place of the queries' or the keys' are off, in blocks and alone."""
    from vitrail.models.fused import attention_forward, branches

    real = attention_forward.attention_forward

    def off(q: Tensor, kv: Any, heads: int, norms: Any = None, *rest: Any) -> Any:
        changed = None if not norms else [torch.ones_like(one) if number == wrong else one for number, one in enumerate(norms)]
        return real(q, kv, heads, changed, *rest)

    monkeypatch.setattr(branches, "attention_forward", off)
    monkeypatch.setattr(attention_forward, "attention_forward", off)
    self_test.works.cache_clear()  # type: ignore[attr-defined]
    self_test.attention_works.cache_clear()  # type: ignore[attr-defined]
    size = HERE, LOW, 64, 96, 2, True
    assert self_test.works(*size) and not self_test.works(*size, True) and "are off by" in caplog.text
    assert not self_test.attention_works(HERE, LOW, 17, 17, 2, 16, True, True)
    self_test.works.cache_clear()  # type: ignore[attr-defined]
    self_test.attention_works.cache_clear()  # type: ignore[attr-defined]


# Around the model


@pytest.mark.slow
def test_compiled_models_have_one_graph(images: Tensor) -> None:
    model = tiny(qk_norm=True).train()
    expected = logits(model, images, "plain")
    torch._dynamo.reset()
    assert near(torch.compile(model, fullgraph=True, backend="aot_eager")(images), expected, CLOSE)


@pytest.mark.parametrize("size", [32, 272])  # few tokens, and more than the attention kernels take
def test_memory_is_planned_through_the_fused_path(size: int, blocks_fused: list[nn.Module]) -> None:
    from vitrail.train.memory import SimulatedModel, simulate

    config = tiny(image_size=size, depth=2).config
    plain, normed = (
        simulate(SimulatedModel(config.replace(qk_norm=qk_norm)), 32, precision="bf16").activations for qk_norm in (False, True)
    )
    assert len(blocks_fused) == 4 and abs(normed - plain) < (0.01 if size == 32 else 0.15) * plain
