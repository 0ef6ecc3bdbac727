"""Copies made for inference compute what the model does, per image, whatever this machine's CPU can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vitrail
from vitrail.errors import VitrailError
from vitrail.models import BiT, ViT, model_config
from vitrail.models.inference import InferenceModel, choose, for_inference, onednn, packed_block
from vitrail.models.inference import precision as precision_module
from vitrail.models.inference.packed_block import _attend_exp2
from vitrail.models.inference.packed_linear import UnpackedLinear, make_linear, quantise
from vitrail.models.inference.precision import CpuFeatures

CPU = torch.device("cpu")
LIMITS = {"fp32": 2e-5, "bf16": 0.03, "int8": 0.06}  # of the logits' and tokens' length
VARIANTS: dict[str, dict[str, Any]] = {
    "Ti/16": {},
    "S/16": {"image_size": 48},
    "mean": {"pooling": "mean"},
    "map": {"pooling": "map"},
    "registers": {"registers": 3},
    "distilled": {"distill_token": True},
    "layer scale": {"layer_scale": 0.1},
    "exact GELU": {"gelu": "erf"},
    "no bias": {"qkv_bias": False},
    "qk norm": {"qk_norm": True},
    "relative": {"position": "relative"},
    "axial": {"attention": "axial"},
    "rectangle": {"image_size": (48, 80)},
    "R+ViT-Ti/16": {"image_size": 64},
}


def build(kind: str = "Ti/16", **changes: Any) -> ViT:
    """A model with every parameter drawn at random, so that nothing is hidden behind a zero or a one."""
    name = kind if "/" in kind else "Ti/16"
    depth = {} if name.startswith("R") else {"depth": 3}
    fields = {"outputs": 20, "image_size": 64, **depth, **VARIANTS.get(kind, {}), **changes}
    model = vitrail.create_model(name, **fields).eval()
    generator = torch.Generator().manual_seed(3)
    for key, parameter in model.named_parameters():
        if parameter.ndim < 2 or "head" in key:
            torch.nn.init.normal_(parameter, float(parameter.detach().mean()), 0.1, generator=generator)
    assert isinstance(model, ViT)
    return model


def some_images(model: ViT | BiT | InferenceModel, count: int = 3) -> Tensor:
    return torch.randn(count, 3, *model.config.image_size, generator=torch.Generator().manual_seed(1))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def fresh_self_tests() -> Iterator[None]:
    """Forget what an earlier test found out about this torch, before and after."""
    onednn.works.cache_clear()
    yield
    onednn.works.cache_clear()


@torch.no_grad()
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("kind", VARIANTS)
def test_copies_compute_what_the_model_does(kind: str, precision: Any) -> None:
    model = build(kind)
    images, limit = some_images(model), LIMITS[precision]
    copy = for_inference(model, precision)
    assert isinstance(copy, InferenceModel) and copy.config == model.config and not copy.training
    assert error(copy(images), model(images)) < limit
    ours, theirs = copy.features(images, layers=[0, -1]), model.features(images, layers=[0, -1])
    for name in ("tokens", "pooled", "pre_logits"):
        assert error(getattr(ours, name), getattr(theirs, name)) < limit
    assert all(error(ours.layers[layer], theirs.layers[layer]) < limit for layer in theirs.layers)


@torch.no_grad()
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_gpu_copy_is_the_same_function(kind: str) -> None:
    """Norms are folded into the layers after them: here in float32 and without a GPU, so that nothing else differs."""
    from vitrail.models.inference.gpu import gpu_copy

    model = build(kind)
    images = some_images(model)
    copied = gpu_copy(model, torch.device("cpu"), torch.float32)
    assert error(copied(images), model(images)) < 2e-6
    folds = kind != "axial"  # which is not among the blocks that a fast path may replace
    assert all((block.norm1.weight is None) == folds for block in copied.model.blocks) and model.blocks[0].norm1.weight is not None
    assert not folds or all(block.mlp.up.weight.sum(dim=1).abs().max() < 1e-5 for block in copied.model.blocks)


@torch.no_grad()
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("kind", ["Ti/16", "relative", "axial"])
def test_attention_of_copies_is_the_models(kind: str, precision: Any) -> None:
    model = build(kind)
    images = some_images(model)
    pairs = zip(for_inference(model, precision).attention(images), model.attention(images), strict=True)
    for (layer, ours), (same, theirs) in pairs:
        assert layer == same and bool((ours >= 0).all())
        torch.testing.assert_close(ours.sum(-1), torch.ones(ours.shape[:-1]))
        assert error(ours, theirs) < LIMITS[precision]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("kind", ["Ti/16", "mean", "relative", "axial", "R+ViT-Ti/16"])
def test_a_result_does_not_depend_on_the_batch(kind: str, precision: Any) -> None:
    copy = for_inference(build(kind), precision)
    images = some_images(copy, 6)
    images[1] *= 50  # an image whose range would show in the others if a scale were shared
    together = copy(images)
    alone = torch.cat([copy(image[None]) for image in images])
    few = torch.cat([copy(images[:2]), copy(images[2:])])
    # AMX sums bfloat16 tiles in an order that depends on how many images there are.
    tolerance = 0.02 if precision == "bf16" and torch.cpu._is_amx_tile_supported() else 1e-5
    for other in (alone, few):
        torch.testing.assert_close(together, other, rtol=0, atol=tolerance * float(together.abs().max()))
    images[1] /= 50
    rest = torch.tensor([0, 2, 3, 4, 5])
    torch.testing.assert_close(copy(images)[rest], together[rest], rtol=0, atol=1e-5 * float(together[rest].abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("precision", LIMITS)
def test_copies_are_deterministic_on_any_number_of_threads(precision: Any) -> None:
    copy, before = for_inference(build(), precision), torch.get_num_threads()
    images, found = some_images(copy, 5), []
    try:
        for threads in (1, 2, 2, 1):
            torch.set_num_threads(threads)
            found.append(copy(images))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[3]) and torch.equal(found[1], found[2])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5 * float(found[0].abs().max()))


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("kind", ["Ti/16", "axial", "R+ViT-Ti/16"])
def test_the_model_itself_is_not_changed(kind: str, precision: Any) -> None:
    model = build(kind).train()
    before = {name: (value, value.clone(), value.requires_grad) for name, value in model.state_dict(keep_vars=True).items()}
    copy = for_inference(model, precision)
    with torch.no_grad():
        answers = copy(some_images(model))
        for parameter in copy.parameters():
            parameter.add_(1)
    assert type(model) is ViT and model.training and all(module.training for module in model.modules())
    for name, value in model.state_dict(keep_vars=True).items():
        same, content, requires = before[name]
        assert value is same and value.requires_grad == requires and torch.equal(value, content)
    copy = for_inference(model, precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(copy(some_images(model)), answers), "the copy still follows the model"


@pytest.mark.slow
@torch.no_grad()
def test_bit_falls_back_to_float32_and_says_so() -> None:
    model = vitrail.create_model("BiT-R50x1", outputs=7, image_size=32, seed=0).eval()
    torch.nn.init.normal_(model.head.weight)
    images = some_images(model)
    for precision in ("auto", "int8", "bf16"):
        chosen = choose(model.config, precision, CPU)
        assert chosen.precision == "fp32" and "BiT-R50x1 is a ResNet" in chosen.why
    copy = for_inference(model, "int8")
    assert isinstance(copy, InferenceModel) and isinstance(copy.model, BiT) and error(copy(images), model(images)) < 1e-5


@torch.no_grad()
def test_weights_in_half_precision_are_computed_in_float32() -> None:
    model = build().bfloat16()
    images = some_images(model)
    found = for_inference(model, "fp32")(images)
    assert found.dtype == torch.float32 and error(found, model.float()(images)) < LIMITS["fp32"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("fault", ["missing", "raises", "wrong"])
def test_an_operation_that_does_not_work_is_not_used(kind: Any, fault: str, monkeypatch: Any, fresh_self_tests: None) -> None:
    name = "int8_linear" if kind == "int8" else "packed_linear"

    def broken(*arguments: Any, **_: Any) -> Tensor:
        if fault == "missing":
            return torch.ops.onednn.there_is_no_such_operation(*arguments)  # type: ignore[no-any-return]
        if fault == "raises":
            raise RuntimeError("could not create a primitive descriptor")
        return torch.zeros(5, 16)

    monkeypatch.setattr(onednn, name, broken)
    model = build()
    chosen = choose(model.config, kind, CPU)
    assert chosen.precision == "fp32"
    assert kind == "fp32" or f"has no {kind} matmul that works" in chosen.why
    images = some_images(model)
    assert error(for_inference(model, kind)(images), model(images)) < LIMITS["fp32"]
    if kind == "fp32":
        assert isinstance(make_linear(torch.ones(4, 4), None, "fp32"), UnpackedLinear)


def test_auto_depends_on_the_cpu_and_the_size(monkeypatch: Any) -> None:
    def chosen(name: str, **features: bool) -> str:
        monkeypatch.setattr(precision_module, "cpu_features", lambda: CpuFeatures(**features))
        return choose(model_config(name), "auto", CPU).precision

    assert chosen("B/16", int8=True, bf16=True) == "int8"
    assert chosen("B/16", int8=True, bf16=False) == "int8"
    assert chosen("B/16", int8=False, bf16=True) == "bf16"
    assert chosen("B/16", int8=False, bf16=False) == "fp32"
    assert chosen("Ti/16", int8=True, bf16=True) == "bf16"
    assert chosen("Ti/16", int8=True, bf16=False) == "fp32"


@torch.no_grad()
def test_int8_without_bfloat16_instructions(monkeypatch: Any) -> None:
    monkeypatch.setattr(precision_module, "cpu_features", lambda: CpuFeatures(int8=True, bf16=False))
    model = build("relative")
    images = some_images(model)
    assert error(for_inference(model, "int8")(images), model(images)) < LIMITS["int8"]


def test_unknown_precisions_and_gradients_are_refused() -> None:
    model = build()
    with pytest.raises(VitrailError, match="'fp8'; it can be auto, fp32, bf16 or int8"):
        for_inference(model, "fp8")  # type: ignore[arg-type]
    with pytest.raises(VitrailError, match="Use the model it was made from"):
        for_inference(model, "fp32").attention_gradients(some_images(model), torch.tensor([0, 0, 0]))  # type: ignore[operator]


@torch.no_grad()
@pytest.mark.parametrize("precision", LIMITS)
def test_nan_stays_nan(precision: Any) -> None:
    copy = for_inference(build(), precision)
    images = some_images(copy)
    images[1, 0, 3, 4] = float("nan")
    finite = copy(images).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(-30, 30), st.floats(1e-6, 1e6))
def test_quantisation_is_right_to_half_a_step(seed: int, shift: float, size: float) -> None:
    x = (torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) + shift) * size
    values, scale, zero = quantise(x.clone())
    assert 0 <= zero <= 255 and values.dtype == torch.uint8
    error = (values.double() - zero) * scale - x.double()
    assert float(error.abs().max()) <= 0.5001 * scale
    assert scale <= (max(float(x.max()), 0.0) - min(float(x.min()), 0.0)) / 254 * 1.0001


def test_zeros_are_quantised() -> None:
    values, scale, zero = quantise(torch.zeros(3, 4))
    assert torch.equal((values.float() - zero) * scale, torch.zeros(3, 4))


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_an_image_that_is_not_finite_leaves_the_others_as_they_are(precision: Any) -> None:
    """Of one chunk: a softmax that must be guarded for one image is computed in another precision."""
    model = build()
    images, made = some_images(model)[:2].repeat(2, 1, 1, 1), for_inference(model, precision)
    expected = made(images)
    images[1, 0, 0, 0] = float("nan")
    found = made(images)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]], rtol=0, atol=1e-6)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
    "a default type": lambda: default_dtype(torch.float64),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_does_not_decide_which_matmuls_work(setting: str, fresh_self_tests: None) -> None:
    """The answer is remembered: a first copy made under autocast would leave all later ones without int8."""
    expected = [onednn.works(precision) for precision in LIMITS]
    onednn.works.cache_clear()
    with SETTINGS[setting]():
        assert [onednn.works(precision) for precision in LIMITS] == expected


@torch.no_grad()
@pytest.mark.parametrize("size", [1.0, 40.0, 1000.0])
@pytest.mark.parametrize("shift", [0.0, -2000.0])
def test_softmax_by_powers_of_two_in_any_range(size: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 9, 8, generator=generator) for _ in range(3))
    bias = torch.full((4, 9, 9), shift)
    expected = F.softmax((size * q @ k.transpose(1, 2) + bias).double() * torch.tensor(2.0).log(), dim=-1) @ v.double()
    found = _attend_exp2(size * q, k, v, bias)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-3 if size > 100 else 1e-4)


@torch.no_grad()
def test_outlier_channels_do_not_cost_the_others_precision() -> None:
    """The outliers of trained models: a few channels of a norm much larger, the weights behind them smaller by as much."""
    model = build()
    images = some_images(model)
    expected, usual = model(images), error(for_inference(model, "int8")(images), model(images))
    for block in model.blocks:
        for norm, linear in ((block.norm1, block.attention.qkv), (block.norm2, block.mlp.up)):
            norm.weight[5:9] *= 20
            norm.bias[5:9] *= 20
            linear.weight[:, 5:9] /= 20
    torch.testing.assert_close(model(images), expected)  # the same function
    assert error(for_inference(model, "int8")(images), expected) < 1.5 * usual


@torch.no_grad()
def test_attention_in_parts_equals_attention_at_once(monkeypatch: Any) -> None:
    copy = for_inference(build("relative"), "bf16")
    images = some_images(copy)
    whole = copy(images)
    monkeypatch.setattr(packed_block, "SCORES_BYTES", 2 * 17 * 17 * 2)
    assert error(copy(images), whole) < 1e-2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_copies_do_not_depend_on_torchs_defaults(precision: Any) -> None:
    """Of type and device: a script may have set them to build another model."""
    model = build()
    images, plain = some_images(model), for_inference(model, precision)
    expected = plain(images)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = for_inference(model, precision)
        assert torch.equal(plain(images), expected) and torch.equal(made(images), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert torch.equal(for_inference(model, precision)(images), expected)
        assert plain.cpu() is plain


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("changes", [{"distill_token": True}, {"pooling": "map"}, {"attention": "axial"}], ids=str)
def test_a_batch_without_images_has_no_results(changes: dict[str, Any], precision: Any) -> None:
    model = build(**changes)
    images, made = some_images(model)[:0], for_inference(model, precision)
    assert model(images).shape == made(images).shape == (0, model.config.outputs)
    theirs, ours = model.features(images, [1]), made.features(images, [1])
    assert theirs.tokens.shape == ours.tokens.shape == ours.layers[1].shape and theirs.pooled.shape == ours.pooled.shape
    assert [weights.shape for _, weights in model.attention(images)] == [weights.shape for _, weights in made.attention(images)]
    if model.distill_head is not None:
        assert [len(logits) for logits in made.distilled_logits(images)] == [0, 0]


def test_a_bias_of_one_number_is_added_to_all_outputs() -> None:
    model = build()
    model.blocks[0].mlp.up.bias = torch.nn.Parameter(torch.tensor([0.7]))
    images = some_images(model)
    with torch.no_grad():
        assert error(for_inference(model, "fp32")(images), model(images)) < 1e-5
