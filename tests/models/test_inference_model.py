"""`InferenceModel`: what a caller of a model uses, and sentences for what a copy cannot do."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from tests.models.test_inference import LIMITS, build, error, some_images
from tests.models.test_inference_not_plain import COPIES, lora, make_copy
from vitrail.errors import VitrailError
from vitrail.models import BiT, ViT
from vitrail.models.features import evaluating
from vitrail.models.inference import InferenceModel, for_inference
from vitrail.models.inference.cpu import on_worker_threads
from vitrail.models.inference.packed_linear import Int8Linear, PackedLinear

KINDS = ["Ti/16", "axial", "R+ViT-Ti/16"]


def saved_and_loaded(made: InferenceModel) -> InferenceModel:
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_can_be_copied_and_pickled(kind: str, copied: str) -> None:
    made = make_copy(build(kind), copied)
    images = some_images(made)
    expected = made(images)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), saved_and_loaded(made)):
        assert type(other) is type(made) and torch.equal(other(images), expected)
        for parameter in other.parameters():
            parameter.zero_()
        assert torch.equal(made(images), expected), "the copy shares memory with its copy"


@torch.no_grad()
def test_what_a_layer_is_packed_from_comes_back() -> None:
    weight, x = torch.randn(30, 20), torch.randn(2, 5, 20)
    for layer in (
        PackedLinear(weight, None, "tanh", torch.float32, torch.float32),
        PackedLinear(weight, torch.randn(30), None, torch.float32, torch.bfloat16),
        Int8Linear(weight, torch.randn(30), "none", torch.float32),
    ):
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x.clone()), layer(x.clone()))


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("kind", [*KINDS, "relative"])
def test_a_copy_can_be_resized_and_get_a_new_head(kind: str, copied: str) -> None:
    model = build(kind)
    made, limit = make_copy(model, copied), LIMITS[copied.split()[-1]]
    assert made.resize((96, 64)) is made and made.config.image_size == (96, 64)
    model.resize((96, 64))
    images = some_images(model)
    assert error(made(images), model(images)) < limit
    assert made.replace_head(9) is made and made.config.outputs == 9
    found = made(images)
    assert found.shape == (3, 9) and not found.any() and found.dtype == torch.float32
    assert made.head.weight.dtype == torch.float32 and not made.head.weight.requires_grad and not made.head.training
    assert model.config.outputs == 20 and model.head.out_features == 20


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
def test_images_of_any_floating_point_type(copied: str) -> None:
    model = build()
    made, images = make_copy(model, copied), some_images(model).bfloat16()
    expected = model(images.float())
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        found = made(images.to(dtype))
        assert found.dtype == torch.float32 and error(found, expected) < LIMITS[copied.split()[-1]]
        assert error(made.features(images.to(dtype)).pooled, model.features(images.float()).pooled) < LIMITS[copied.split()[-1]]
    for call in (made, made.features, made.attention, made.distilled_logits):
        with pytest.raises(VitrailError, match=r"these are torch\.uint8"):
            call(images.to(torch.uint8))


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
def test_everything_a_model_has(copied: str) -> None:
    model = build("distilled")
    made, limit, images = make_copy(model, copied), LIMITS[copied.split()[-1]], some_images(model)
    for ours, theirs in zip(made.distilled_logits(images), model.distilled_logits(images), strict=True):
        assert ours.dtype == torch.float32 and error(ours, theirs) < limit
    for (layer, ours), (same, theirs) in zip(
        made.attention(images, [1], pooling=True), model.attention(images, [1], pooling=True), strict=True
    ):
        assert layer == same and error(ours.float(), theirs) < limit
    assert made.config is made.model.config and made.norm is made.model.norm and made.head is made.model.head
    assert made.distill_head is made.model.distill_head is not None
    assert made.device == torch.device("cpu") and made.dtype == (torch.bfloat16 if copied == "gpu bf16" else torch.float32)
    with evaluating(made):
        made(images)
    assert not made.training and not any(module.training for module in made.modules())
    with pytest.raises(VitrailError, match="no distillation token"):
        make_copy(build(), copied).distilled_logits(images)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "int8"])
def test_copies_of_a_resnet(precision: Any) -> None:
    model = vitrail.create_model("BiT-R50x1", outputs=7, image_size=32, seed=0).eval()
    nn.init.normal_(model.head.weight)
    made, images = for_inference(model, precision), some_images(model)
    assert isinstance(made.model, BiT) and error(made(images), model(images)) < 1e-5
    assert error(made.features(images).patches, model.features(images).patches) < 1e-5
    assert torch.equal(copy.deepcopy(made)(images), made(images))
    assert made.resize(64).config.image_size == (64, 64) and made.replace_head(3)(images).shape == (3, 3)
    assert made.distill_head is None
    with pytest.raises(VitrailError, match="is a ResNet"):
        made.distilled_logits(images)


@torch.no_grad()
def test_kernels_can_be_chosen_where_there_are_any() -> None:
    model = build()
    made, images = make_copy(model, "gpu fp32"), some_images(model)
    made.kernels = "plain"
    assert made.kernels == made.model.kernels == "plain" and model.kernels == "auto"
    assert error(made(images), model(images)) < LIMITS["fp32"]
    made.kernels = "triton"  # type: ignore[assignment]
    with pytest.raises(VitrailError, match=r"model\.kernels is 'triton'; it can be auto, plain, fp8\."):
        made(images)
    packed = make_copy(model, "fp32")
    with pytest.raises(VitrailError, match=r"has no kernels to choose: .* Use the model it was made from\."):
        packed.kernels = "plain"
    assert packed.kernels == "auto"


@pytest.mark.parametrize("copied", COPIES)
def test_what_a_copy_cannot_do_is_refused(copied: str) -> None:
    model = build()
    made, images = make_copy(model, copied), some_images(model)
    refused: dict[str, Any] = {
        "has no gradients": lambda: made.attention_gradients(images, torch.zeros(3, dtype=torch.int64)),
        "no gradients": made.requires_grad_,
        "torch.func": lambda: torch.func.grad(lambda x: made(x).sum())(images),
        "cannot be trained": made.train,
        "which are no checkpoint": made.state_dict,
        "Load the weights into the model it was made from": lambda: made.load_state_dict(model.state_dict()),
        "no backward pass": made.checkpoint_activations,
        "already": lambda: for_inference(made),  # type: ignore[arg-type]
    }
    for sentence, call in refused.items():
        with pytest.raises(VitrailError, match=sentence):
            call()
    assert made.eval() is made and made.train(False) is made and made.requires_grad_(False) is made
    assert not made(images.requires_grad_()).requires_grad


@torch.no_grad()
@pytest.mark.parametrize("precision", LIMITS)
def test_packed_layers_are_not_moved_or_converted(precision: Any) -> None:
    made = for_inference(build(), precision)
    images = some_images(made)
    expected = made(images)
    for move in (made.half, made.double, lambda: made.to("meta"), lambda: made.to(torch.bfloat16)):
        with pytest.raises(VitrailError, match="packed for the CPU"):
            move()
    assert made.to("cpu") is made and made.float() is made and torch.equal(made(images), expected)


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES)
def test_autocast_and_inference_mode_change_nothing(copied: str) -> None:
    model = build()
    lora(model)  # a part that autocast would reach
    with torch.inference_mode():
        made = make_copy(model, copied)
    images = some_images(model)
    expected, attention = made(images), list(made.attention(images))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made(images), expected) and made(images).dtype == torch.float32
        assert torch.equal(made.features(images).pooled, made.features(images).pooled.to(made.dtype))
        assert all(torch.equal(ours, same) for (_, ours), (_, same) in zip(made.attention(images), attention, strict=True))
    with torch.inference_mode():
        assert torch.equal(made(images), expected)


@torch.no_grad()
@pytest.mark.parametrize("copied", ["gpu bf16", "bf16"])
def test_logits_are_not_rounded_to_bfloat16(copied: str) -> None:
    """400 sigmoid logits around −10: of bfloat16 they would take 16 values."""
    model = build(outputs=400)
    model.head.weight.mul_(0.1)
    nn.init.constant_(model.head.bias, -10)
    made = make_copy(model, copied)
    assert torch.equal(made.head.weight, model.head.weight), "the head's weights were rounded"
    assert len(made(some_images(model, 1)).unique()) > 380


@torch.no_grad()
@pytest.mark.parametrize("precision", LIMITS)
def test_a_flop_counter_sees_what_threads_would_compute(precision: Any) -> None:
    made, before = for_inference(build(), precision), torch.get_num_threads()
    totals = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with FlopCounterMode(display=False) as counter:
                made(some_images(made, 4))
            totals.append(counter.get_total_flops())
    finally:
        torch.set_num_threads(before)
    assert totals[0] == totals[1] > 0


def test_batches_of_many_sizes_share_worker_threads() -> None:
    """A service sees every batch size. With 12 threads for torch one pool for each would have 77 of its own."""
    before, sizes = torch.get_num_threads(), range(2, 13)
    try:
        torch.set_num_threads(12)
        for size in sizes:
            images = torch.arange(float(size))
            assert torch.equal(on_worker_threads(lambda x: x + 1, images), images + 1)
        # Each call computes on 1, 2, 3, 4 or 6 of torch's threads, so there are five pools: 12 + 6 + 4 + 3 + 2 threads.
        assert sum(one.name.startswith("vitrail-worker") for one in threading.enumerate()) < 40
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_worker_threads_after_a_fork(tmp_path: Path) -> None:
    """A child has none of its parent's threads: work given to them would wait for ever."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert on_worker_threads(lambda x: x + 1, torch.zeros(4)).sum() == 4
        child = os.fork()
        if child == 0:
            try:
                (tmp_path / "sum").write_text(str(float(on_worker_threads(lambda x: x + 1, torch.zeros(4)).sum())))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    finally:
        torch.set_num_threads(before)
    assert (tmp_path / "sum").read_text() == "4.0"


def test_a_copy_is_no_vit() -> None:
    """The copied model is inside, of its own class."""
    made = for_inference(build(), "fp32")
    assert not isinstance(made, ViT) and type(made.model) is ViT
