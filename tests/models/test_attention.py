"""The attention that is shown is the attention that is used."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail import VitrailError, create_model
from vitrail.models import ViT
from vitrail.models.attention import Attention, _without_cudnn, sdpa
from vitrail.models.config import Pair

SMALL = {"width": 24, "heads": 3, "depth": 2, "mlp": 32, "outputs": 5, "patch": 4}
POSITIONS = ["learned", "learned-2d", "relative", "sincos2d", "none"]


def build(**fields: object) -> ViT:
    """A model whose attention is far from uniform, so that a wrong one shows."""
    model = create_model("S/16", **{**SMALL, **fields}, seed=1)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "qkv.weight" in name:
            parameter.data[: 2 * parameter.shape[1]] *= 2
        elif "positions" in name or "head" in name:
            torch.nn.init.normal_(parameter, generator=generator)
    return model  # type: ignore[return-value]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    position=st.sampled_from(POSITIONS),
    attention=st.sampled_from(["full", "axial"]),
    pooling=st.sampled_from(["class", "mean"]),
    registers=st.integers(0, 3),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
)
def test_rows_sum_to_one_and_reproduce_the_fused_output(
    position: str, attention: str, pooling: str, registers: int, rows: int, columns: int
) -> None:
    size = (4 * rows, 4 * columns)
    model = build(position=position, attention=attention, pooling=pooling, registers=registers, image_size=size).eval()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(rows * 5 + columns))
    with torch.no_grad():
        x = model.add_prefix_and_positions(model.embed_patches(images))
        shown = list(model.attention(images))
        assert [layer for layer, _ in shown] == list(range(model.config.blocks))
        for layer, weights in shown:
            tokens = model.config.tokens
            assert weights.shape == (2, 3, tokens, tokens) and (weights >= 0).all()
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, tokens), atol=1e-5, rtol=0)
            x, bias = model.positions.before_layer(x, layer), model.positions.bias(layer)
            block = model.blocks[layer]
            _, _, v = block.attention._split(block.norm1(x))
            fused = block.attention(block.norm1(x), bias)
            torch.testing.assert_close(block.attention._merge(weights @ v), fused, atol=1e-4, rtol=0)
            x = block(x, bias)


def test_weights_are_the_softmax_of_the_scores() -> None:
    model = build(image_size=12).eval()
    images = torch.randn(1, 3, 12, 12)
    (_, weights), *_ = model.attention(images, layers=[0])
    block = model.blocks[0]
    width, heads = 24, 3
    with torch.no_grad():
        x = block.norm1(model.add_prefix_and_positions(model.embed_patches(images)))[0].double()
        q, k, _ = (x @ block.attention.qkv.weight.double().T + block.attention.qkv.bias.double()).split(width, dim=1)
    for head in range(heads):
        part = slice(head * 8, head * 8 + 8)
        expected = torch.softmax(q[:, part] @ k[:, part].T / 8**0.5, dim=-1)
        torch.testing.assert_close(weights[0, head].double(), expected, atol=1e-5, rtol=0)


def test_a_caller_chooses_torchs_attention_kernel() -> None:
    """Only the plain one has a second derivative."""
    model, images = build(image_size=12), torch.randn(2, 3, 12, 12)
    weight = model.blocks[0].mlp.up.weight
    with sdpa_kernel(SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(model(images).square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), weight)
    assert second.isfinite().all() and second.any()


def test_cudnn_is_left_out_and_what_was_disabled_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = torch.backends.cuda
    seen: list[tuple[bool, ...]] = []

    def state() -> tuple[bool, ...]:
        kernels = flags.flash_sdp_enabled, flags.mem_efficient_sdp_enabled, flags.math_sdp_enabled, flags.cudnn_sdp_enabled
        return tuple(one() for one in kernels)

    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *given, **named: (seen.append(state()), q)[1])
    with FakeTensorMode():
        q = torch.empty(1, 1, 4, 8, device="cuda")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        before = state()
        sdpa(q, q, q)
        assert state() == before
    sdpa(q, q, q)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # asked for by name
        sdpa(q, q, q)
    assert seen == [(True, False, True, False), (True, True, True, False), (False, False, False, True)]


class _OnGpu:
    is_cuda = True


@pytest.mark.slow
def test_a_compiled_model_uses_the_kernels_that_were_enabled_when_it_was_compiled() -> None:
    found: list[list[str]] = []

    def attend(q: Tensor) -> Tensor:
        with _without_cudnn(_OnGpu()):  # type: ignore[arg-type]
            return F.scaled_dot_product_attention(q, q, q)

    def backend(module: Any, inputs: Any) -> Any:
        chosen = next((node for node in module.graph.nodes if node.target is torch.nn.attention._sdpa_kernel), None)
        found.append([] if chosen is None else [kernel.args[0] for kernel in chosen.args[0]])
        return module

    for kernels in ([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION], [SDPBackend.MATH]):
        torch._dynamo.reset()
        with sdpa_kernel(kernels):
            torch.compile(attend, fullgraph=True, backend=backend)(torch.zeros(1, 1, 4, 8))
    assert found == [["MATH"], []]  # in the second nothing is left to disable


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("registers", [0, 2])
def test_axial_attention_stays_on_its_line(axis: int, registers: int) -> None:
    model = build(attention="axial", registers=registers, image_size=(12, 16))
    weights = dict(model.attention(torch.randn(1, 3, 12, 16)))[axis]
    count = 1 + registers
    for query in range(12):
        for key in range(12):
            same = query // 4 == key // 4 if axis == 0 else query % 4 == key % 4
            assert (weights[0, :, count + query, count + key] > 0).all() == same
    assert (weights[0, :, :count] > 0).all() and (weights[0, :, :, :count] > 0).all()


def test_axial_twice_covers_the_image() -> None:
    """A row block and then a column block let every patch reach every other: that is the point of the pair."""
    model = build(attention="axial", pooling="mean", image_size=(12, 16))
    rows, columns = (weights[0, 0] for _, weights in model.attention(torch.randn(1, 3, 12, 16), layers=[0, 1]))
    assert ((columns @ rows) > 0).all()


def test_dropout_is_off_in_eval_and_on_in_training() -> None:
    model = build(image_size=12, dropout=0.5, attention_dropout=0.5, stochastic_depth=0.5)
    images = torch.randn(4, 3, 12, 12)
    model.train()
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    plain = build(image_size=12).eval()
    torch.testing.assert_close(model(images), plain(images), atol=1e-6, rtol=0)


def test_attention_is_shown_in_eval_mode_and_leaves_every_mode_as_it_was() -> None:
    model = build(image_size=12, dropout=0.5, attention_dropout=0.5).train()
    model.blocks[0].eval()
    images = torch.randn(1, 3, 12, 12)
    for (_, one), (_, two) in zip(model.attention(images), model.attention(images), strict=True):
        assert torch.equal(one, two)
        assert model.training and not model.blocks[0].training and model.blocks[1].training
        assert torch.is_grad_enabled() and not one.requires_grad
    next(iter(model.attention(images)))  # abandoned half-way
    gc.collect()
    assert model.training and torch.is_grad_enabled()


def test_only_the_given_layers_and_nothing_after_them() -> None:
    model = build(image_size=12, depth=4)
    images = torch.randn(1, 3, 12, 12)
    every = dict(model.attention(images))
    some = dict(model.attention(images, layers=[2, -4]))
    assert list(some) == [0, 2]
    for layer, weights in some.items():
        torch.testing.assert_close(weights, every[layer], atol=1e-6, rtol=0)
    calls = []
    model.blocks[3].norm1.register_forward_hook(lambda *_: calls.append(1))
    list(model.attention(images, layers=[0, 2]))
    assert not calls


def fivefold(module: nn.Module) -> None:
    """Make a module's output five times as large, by a hook."""
    module.register_forward_hook(lambda module, given, found: 5 * found)


def fivefold_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *given, **named: 5 * forward(*given, **named)  # type: ignore[method-assign]


@pytest.mark.parametrize("attention", ["full", "axial"])
@pytest.mark.parametrize("change", [fivefold, fivefold_forward])
def test_hooks_and_patched_methods_count(attention: str, change: Callable[[nn.Module], None]) -> None:
    """Of the attention as a whole, which for the weights' sake is computed another way than usually."""
    model, same = (build(attention=attention, depth=3, image_size=16).double() for _ in range(2))
    change(model.blocks[0].attention)
    same.blocks[0].attention.out.weight.data *= 5
    same.blocks[0].attention.out.bias.data *= 5
    images, outputs = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.tensor([1, 3])
    expected = [list(same.attention(images)), list(same.attention_gradients(images, outputs))]
    found = [list(model.attention(images)), list(model.attention_gradients(images, outputs))]
    torch.testing.assert_close(found, expected)
    assert all("_attend" not in vars(block.attention) for block in model.blocks)


def test_attention_that_is_computed_elsewhere_is_refused() -> None:
    model = build(image_size=16)
    model.blocks[0].attention.forward = lambda x, *rest: x
    with pytest.raises(VitrailError, match="does not say what it attends to"):
        next(model.attention(torch.randn(1, 3, 16, 16)))


def test_one_layer_at_a_time() -> None:
    """Nothing keeps a layer's matrix alive once the next one is asked for."""
    import weakref

    model = build(image_size=12, depth=4)
    kept = None
    for _, weights in model.attention(torch.randn(1, 3, 12, 12)):
        assert kept is None or kept() is None or kept() is weights
        kept = weakref.ref(weights)
        del weights


def test_bad_layers_are_sentences_at_the_call() -> None:
    model = build(image_size=12)
    images = torch.randn(1, 3, 12, 12)
    with pytest.raises(VitrailError, match="Leave it out for all 2 layers"):
        model.attention(images, layers=[])
    with pytest.raises(VitrailError, match="no layer 2: the model has 2, numbered 0 to 1"):
        model.attention(images, layers=[2])
    with pytest.raises(VitrailError, match="it has no attention"):
        create_model("BiT-R26x1", device="meta").attention(images)


def test_blocks_of_another_class_are_run_on_the_way() -> None:
    model, images = build(depth=3, image_size=8), torch.randn(2, 3, 8, 8)
    model.blocks[1] = nn.Identity()
    (first, one), (last, two) = model.attention(images, [0, 2])
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[2]])
    expected = [weights for _, weights in model.attention(images)]
    assert (first, last) == (0, 2) and torch.equal(one, expected[0]) and torch.equal(two, expected[1])


class FlatAttention(Attention):
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *grid: Pair) -> Tensor:
        return super()._attend(q / 100, k, v, bias, *grid)


@pytest.mark.parametrize("change", ["a subclass", "a method of the instance"])
def test_the_last_block_attends_as_its_class_says_also_for_few_queries(change: str) -> None:
    """Logits are read from one token, features are of all: both must come from the same attention."""
    model, images = build().eval(), torch.randn(2, 3, *build().config.image_size)
    before = model(images)
    attention = model.blocks[-1].attention
    if change == "a subclass":
        attention.__class__ = FlatAttention
    else:
        attention._attend = MethodType(FlatAttention._attend, becomes_flat(attention))  # type: ignore[method-assign, assignment]
    found = model(images)
    assert torch.allclose(found, model.logits(model.features(images).tokens), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before, atol=1e-2)


def becomes_flat(attention: Attention) -> Attention:
    made = copy.copy(attention)
    made.__class__ = FlatAttention
    return made
