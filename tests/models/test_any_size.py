"""Images of any size: a model with `any_size` computes what its resized copy computes, and keeps its own table."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.test_positions import KINDS
from vitrail import VitrailError, create_model
from vitrail.models import RULES, ViT, resample, resize_grid
from vitrail.models.config import Pair, PositionRule, ViTConfig
from vitrail.models.inference import for_inference
from vitrail.models.lora import add_lora
from vitrail.models.masked import MaskedPatches
from vitrail.models.surgery import accepting_any_size

SMALL = {"width": 16, "heads": 2, "depth": 2, "mlp": 32, "outputs": 5, "patch": 4}
HYBRID = {"width": 16, "heads": 2, "depth": 2, "mlp": 32, "outputs": 5}
OWN: Pair = (16, 24)
OTHERS: list[Pair] = [(24, 16), (8, 48), (40, 12), (4, 4)]  # the first two have as many tokens as the model's own size


def small(size: Pair = OWN, name: str = "ViT-S/16", **fields: Any) -> ViT:
    """A model whose positions matter as much as its patches."""
    sizes = HYBRID if "+" in name else SMALL
    model = create_model(name, **{**sizes, "position_std": 1.0, "any_size": True, **fields}, image_size=size, seed=0)
    assert isinstance(model, ViT)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model.eval()


def images(size: Pair, count: int = 2, seed: int = 2) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))


def resized(model: ViT, size: Pair) -> ViT:
    return copy.deepcopy(model).resize(size)


def differs(model: ViT, size: Pair, expected: Tensor) -> bool:
    """Whether a copy that cuts and repeats its positions, instead of resampling them, gives another answer: the test could fail."""
    wrong = resized(model, size)
    for parameter in wrong.positions.parameters():
        parameter.data.copy_(parameter.data.flip(1) if parameter.shape[1] > 1 else parameter.data + 1)
    with torch.no_grad():
        return bool((wrong(images(size)) - expected).abs().max() > 1e-3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_computes_what_its_resized_copy_computes(kind: dict[str, object], rule: PositionRule) -> None:
    model = small(**kind, position_resize=rule)
    for size in OTHERS:
        with torch.no_grad():
            expected = resized(model, size)(images(size))
            torch.testing.assert_close(model(images(size)), expected, atol=1e-6, rtol=1e-6)
        if rule == "reference" and kind["position"] not in ("none", "sincos2d") and size != (4, 4):
            assert differs(model, size, expected)
    assert model.config.image_size == OWN and model.positions.grid == (4, 6)


@pytest.mark.parametrize(
    "fields",
    [
        {"registers": 3},
        {"registers": 2, "position_prefix": False},
        {"distill_token": True},
        {"pooling": "map"},
        {"pooling": "mean", "final_norm": "after-pool", "pre_logits": 12},
        {"attention": "axial"},
        {"attention": "axial", "position": "relative", "registers": 1},
        {"attention": "axial", "position": "learned-2d", "pooling": "mean"},
        {"patch": (8, 4)},
        {"qk_norm": True, "layer_scale": 0.3, "position_at": "every-layer"},
    ],
    ids=str,
)
def test_every_output_is_that_of_the_resized_copy(fields: dict[str, object]) -> None:
    model = small(**fields)
    for size in [(24, 16), (8, 48), (40, 12)]:
        batch, other = images(size), resized(model, size)
        with torch.no_grad():
            torch.testing.assert_close(model(batch), other(batch), atol=1e-6, rtol=1e-6)
            ours, theirs = model.features(batch, layers=[0]), other.features(batch, layers=[0])
            assert ours.grid == theirs.grid == other.config.grid
            for name in ("tokens", "prefix", "patches", "pooled", "pre_logits"):
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(ours.layers[0], theirs.layers[0], atol=1e-6, rtol=1e-6)
            for layers in (None, [1]):
                for one, two in zip(model.attention(batch, layers), other.attention(batch, layers), strict=True):
                    torch.testing.assert_close(one[1], two[1], atol=1e-6, rtol=1e-6)
        gradients = (m.attention_gradients(batch, torch.tensor([1, 2])) for m in (model, other))
        for (_, _, ours_gradient), (_, _, theirs_gradient) in zip(*gradients, strict=True):
            if ours_gradient is not None:
                torch.testing.assert_close(ours_gradient, theirs_gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["R+ViT-Ti/16", pytest.param("R26+ViT-S/32", marks=pytest.mark.slow)])
def test_a_hybrid_takes_any_size(name: str) -> None:
    stride = 32
    model = small((2 * stride, 3 * stride), name)
    for rows, columns in ((3, 2), (1, 4)):
        size = rows * stride, columns * stride
        with torch.no_grad():
            torch.testing.assert_close(model(images(size)), resized(model, size)(images(size)), atol=1e-6, rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(*[st.integers(1, 9)] * 4, st.sampled_from([kind for kind in KINDS if kind["position"] != "none"]), st.sampled_from([*RULES]))
def test_any_grid_from_any_grid(
    rows: int, columns: int, new_rows: int, new_columns: int, kind: dict[str, object], rule: PositionRule
) -> None:
    model, size = small((4 * rows, 4 * columns), **kind, position_resize=rule), (4 * new_rows, 4 * new_columns)
    with torch.no_grad():
        torch.testing.assert_close(model(images(size)), resized(model, size)(images(size)), atol=1e-6, rtol=1e-6)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 24), st.integers(2, 24), st.integers(1, 24), st.integers(2, 24), st.sampled_from([*RULES]))
def test_resampling_and_its_gradient_are_those_of_torchs_interpolation(
    rows: int, columns: int, new_rows: int, new_columns: int, rule: PositionRule
) -> None:
    """One product per axis against torch's own two-dimensional kernel and autograd through it."""
    generator = torch.Generator().manual_seed(rows * 25 + columns)
    ours = torch.randn(2, rows, columns, 3, generator=generator, dtype=torch.float64).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    mode, align, antialias = RULES[rule]
    found = resize_grid(ours, (new_rows, new_columns), rule)
    expected = F.interpolate(
        theirs.permute(0, 3, 1, 2), (new_rows, new_columns), mode=mode, align_corners=align, antialias=antialias
    ).permute(0, 2, 3, 1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    grad_out = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    found.backward(grad_out)
    expected.backward(grad_out)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_single_row_or_column_is_resampled_as_one_of_many(rule: PositionRule) -> None:
    """As learned-2d positions are. torch's own antialiased kernel gets one column wrong."""
    row = torch.randn(1, 1, 9, 4)
    whole = resize_grid(row.expand(-1, 5, -1, -1), (5, 14), rule)
    torch.testing.assert_close(resize_grid(row, (1, 14), rule), whole[:, :1], atol=1e-6, rtol=1e-6)
    turned = resize_grid(row.transpose(1, 2), (14, 1), rule)
    torch.testing.assert_close(turned.transpose(1, 2), whole[:, :1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind["position"] not in ("none", "sincos2d")], ids=str)
def test_positions_learn_from_images_of_other_sizes(kind: dict[str, object]) -> None:
    """A step on another size is a step on the resampled table: the gradients are those of finite differences."""
    model = small(**kind).double().train()
    batch = images((24, 12)).double()
    model(batch).square().sum().backward()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.positions.named_parameters():
        assert parameter.grad is not None, name
        direction, step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64), 1e-5
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * step)
                values.append(model(batch).square().sum())
                parameter.sub_(direction, alpha=sign * step)
        slope = (values[0] - values[1]) / (2 * step)
        torch.testing.assert_close((parameter.grad * direction).sum(), slope, atol=1e-6, rtol=1e-5)


def _edits(model: ViT) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every way in which a table changes between two calls; some leave no trace that a cache could look at."""
    table = model.positions.table
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train() -> None:
        model(images((8, 8))).square().sum().backward()
        optimizer.step()

    def unseen() -> None:  # as a kernel of one's own or a CUDA graph writes: no version counts it
        table.data.numpy()[...] *= -1

    yield "a training step", train
    yield "an edit in place", lambda: torch.nn.init.normal_(table)
    yield "an edit of its data", lambda: table.data.mul_(2.0)
    yield "an edit of its memory", unseen
    yield "loaded weights", lambda: model.load_state_dict(_other_state())
    yield "a new parameter", lambda: setattr(model.positions, "table", torch.nn.Parameter(torch.randn(1, 25, 16)))
    yield "its own size changed", lambda: model.resize((24, 24))
    yield "its rule changed", lambda: model.resize((24, 24), "timm")


def _other_state() -> dict[str, Tensor]:
    model = create_model("ViT-S/16", **SMALL, image_size=OWN, seed=9, position_std=1.0)
    torch.nn.init.normal_(model.head.weight)
    return dict(model.state_dict())


def test_nothing_of_an_old_table_is_ever_used() -> None:
    model, size = small(), (32, 12)
    batch = images(size)
    with torch.no_grad():
        last = model(batch)
    for what, edit in _edits(model):
        edit()
        with torch.no_grad():
            found = model(batch)
            torch.testing.assert_close(found, resized(model, size)(batch), atol=1e-6, rtol=1e-6, msg=what)
            assert (found - last).abs().max() > 1e-3, what  # the edit did matter
        last = found
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(other(batch), last)
            torch.nn.init.normal_(other.positions.table)
            assert not torch.equal(other(batch), last) and torch.equal(model(batch), last)


def test_what_is_kept_serves_every_mode_and_precision() -> None:
    """Interpolation matrices first made in inference mode, under fake tensors or a transform serve training afterwards."""
    batch = images((44, 28))  # a size of this test alone
    model = small(position="sincos2d")
    learned = small()
    with torch.inference_mode():
        model(batch), learned(batch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        learned(torch.randn(2, 3, 52, 28))
    torch.func.grad(lambda x: learned(x).sum())(images((52, 28)))
    for size in ((44, 28), (52, 28)):
        model.zero_grad()
        learned.zero_grad()
        (model(images(size)) + learned(images(size))).square().sum().backward()
        assert learned.positions.table.grad is not None and learned.positions.table.grad.abs().sum() > 0
    low = learned.bfloat16()
    with torch.no_grad():
        assert torch.equal(low(batch), resized(low, (44, 28))(batch))


def test_what_a_cuda_graph_reads_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with torch.no_grad():
        model(images((60, 24)))
    monkeypatch.undo()
    matrix = weakref.ref(resample._matrix(4, 15, "reference", torch.device("cpu")))
    resample._kept.cache_clear()
    assert matrix() is not None
    free = weakref.ref(resample._matrix(4, 17, "reference", torch.device("cpu")))
    resample._kept.cache_clear()
    assert free() is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_copies_for_inference_take_any_size(precision: str) -> None:
    model = small(position_at="input")
    made = for_inference(model, precision, torch.device("cpu"))  # type: ignore[arg-type]
    for size in ((24, 16), (8, 48)):
        batch, other = images(size, 5), for_inference(resized(model, size), precision, torch.device("cpu"))  # type: ignore[arg-type]
        torch.testing.assert_close(made(batch), other(batch), atol=1e-6, rtol=1e-6)
        assert made.features(batch).grid == (size[0] // 4, size[1] // 4)
        for one, two in zip(made.attention(batch), other.attention(batch), strict=True):
            torch.testing.assert_close(one[1], two[1], atol=1e-6, rtol=1e-6)
    with pytest.raises(VitrailError, match=r"Nearest: 20×24, 24×24"):
        made(images((22, 24)))


def test_adapters_take_any_size() -> None:
    model = small()
    add_lora(model, 2, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(model(images((8, 48))), resized(model, (8, 48))(images((8, 48))), atol=1e-6, rtol=1e-6)


def test_recomputed_blocks_have_the_same_gradients() -> None:
    grads = []
    for recompute in (False, True):
        model = small(attention="axial", position_at="every-layer").train()
        if recompute:
            model.checkpoint_activations()
        model(images((24, 8))).square().sum().backward()
        grads.append(model.positions.table.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_takes_any_size(dynamic: bool) -> None:
    model = small()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    for size in (OWN, (24, 16), (8, 48), (40, 12)):
        with torch.no_grad():
            torch.testing.assert_close(compiled(images(size)), resized(model, size)(images(size)), atol=1e-6, rtol=1e-6)


def test_wrong_sizes_are_sentences() -> None:
    with pytest.raises(VitrailError, match=r"16×24 images, these are 24×16.*model\.resize\(\(24, 16\)\).*any_size=True"):
        small(any_size=False)(images((24, 16)))
    model = small()
    for call in (model, model.features, lambda x: list(model.attention(x))):
        with pytest.raises(VitrailError, match=r"Image 18×24 is not a multiple of patch 4\. Nearest: 16×24, 20×24\."):
            call(images((18, 24)))
    with pytest.raises(VitrailError, match=r"Image 3×24 is not a multiple of patch 4\. Nearest: 4×24"):
        model(images((3, 24)))
    masked = MaskedPatches(model, 8)
    masked.reset()
    with pytest.raises(VitrailError, match=r"is pre-trained on 16×24 images, these are 24×16"):
        masked(images((24, 16)), torch.rand(2, 24, 2))


def test_the_field_is_stored_and_may_be_missing() -> None:
    config = small().config
    stored = config.to_dict()
    assert stored["any_size"] is True and ViTConfig.from_dict(stored) == config
    del stored["any_size"]
    assert ViTConfig.from_dict(stored) == config.replace(any_size=False)


def test_a_model_is_not_changed_through_the_one_that_shares_its_weights() -> None:
    model = create_model("ViT-Ti/16", image_size=32, depth=1, outputs=3, seed=0)
    shared = accepting_any_size(model)
    assert shared.head is model.head and shared.class_token is model.class_token and not model.config.any_size
    shared.replace_head(7)
    shared.class_token = None
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3) and model.class_token is not None
