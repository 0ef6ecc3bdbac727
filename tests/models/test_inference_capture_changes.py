"""Whatever is changed about a captured copy, its modules, their classes or torch's functions, counts at its next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.test_inference import error
from tests.models.test_inference_capture import (
    CLOSE,
    DEVICE,
    GraphClass,
    _counted_from_zero,
    captured,
    make,
    random_images,
    uncaptured,
)
from vitrail.models.inference import InferenceModel
from vitrail.models.inference.capture import WARMUP_CALLS
from vitrail.models.layers import Float32Linear, Mlp
from vitrail.models.vit import ViT

__all__ = ["_counted_from_zero"]


def in_place(made: InferenceModel) -> None:
    made.model.blocks[1].attention.out.weight.mul_(1.5)


def new_memory(made: InferenceModel) -> None:
    weight = made.model.blocks[1].attention.out.weight
    weight.data = weight.data * 1.5


def new_parameter(made: InferenceModel) -> None:
    made.model.blocks[1].attention.out.bias = nn.Parameter(torch.randn(192, device=DEVICE), requires_grad=False)


def new_module(made: InferenceModel) -> None:
    made.model.norm = nn.Identity()


def another_block(made: InferenceModel) -> None:
    made.model.blocks.append(copy.deepcopy(made.model.blocks[0]))


def loaded(made: InferenceModel) -> None:
    made.model.load_state_dict({name: value * 1.1 for name, value in made.model.state_dict().items()})


def loaded_by_assignment(made: InferenceModel) -> None:
    made.model.load_state_dict({name: value * 1.1 for name, value in made.model.state_dict().items()}, assign=True)


def hook(made: InferenceModel) -> None:
    made.model.norm.register_forward_hook(lambda module, given, found: 2 * found)


def patched_forward(made: InferenceModel) -> None:
    made.model.blocks[0].mlp.forward = torch.tanh


def other_class(made: InferenceModel) -> None:
    class Sine(type(made.model.blocks[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    made.model.blocks[0].mlp.__class__ = Sine


def attribute(made: InferenceModel) -> None:
    made.model.blocks[0].attention.heads = 6


def inner_resize(made: InferenceModel) -> None:
    made.model.resize(64, "timm")
    made.model.positions.resize((4, 4), "timm")
    made.model.positions.table.data *= 2


def to_double(made: InferenceModel) -> None:
    made.double()
    made.model.norm.weight.data *= 2


def inner_to(made: InferenceModel) -> None:
    made.model.to(torch.float64)
    made.model.norm.weight.data *= 2


def eval_and_dropout(made: InferenceModel) -> None:
    """Not a change of a weight: the mode of a module inside."""
    made.model.blocks[0].mlp.dropout.p, made.model.blocks[0].mlp.dropout.training = 1.0, True


CHANGES = [
    in_place, new_memory, new_parameter, new_module, another_block,
    loaded, loaded_by_assignment, hook, patched_forward, other_class, attribute,
    inner_resize, to_double, inner_to, eval_and_dropout,
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_change_of_the_model_is_missed(change: Callable[[InferenceModel], None]) -> None:
    made = make()
    images = random_images(made)
    captured(made, images)
    before = made(images)
    change(made)
    expected = uncaptured(made, images)
    assert error(expected, before) > 2 * CLOSE, "the change changes nothing"
    for _ in range(WARMUP_CALLS + 2):
        assert error(made(images), expected) < CLOSE


@torch.no_grad()
def test_a_class_that_is_patched_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    images, called = random_images(made), list[nn.Module]()
    captured(made, images)
    before = made(images)
    with monkeypatch.context() as patch:
        patch.setattr(Mlp, "forward", lambda self, x: (called.append(self), torch.sin(x))[1])
        for _ in range(2):
            called.clear()
            found = made(images)
            assert made.model.blocks[0].mlp in called and error(found, before) > 2 * CLOSE
    called.clear()
    assert error(made(images), before) < CLOSE and not called


@torch.no_grad()
@pytest.mark.parametrize("name", ["gelu", "scaled_dot_product_attention"])
def test_a_function_of_torch_that_is_patched_later_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    images, real = random_images(made), getattr(F, name)
    captured(made, images)
    before, replayed = made(images), GraphClass.replayed
    with monkeypatch.context() as patch:
        patch.setattr(F, name, lambda *given, **named: 2 * real(*given, **named))
        for _ in range(WARMUP_CALLS + 2):
            assert error(made(images), before) > 2 * CLOSE
    assert GraphClass.replayed <= replayed + 1  # that one was thrown away
    assert error(made(images), before) < CLOSE


@torch.no_grad()
@pytest.mark.parametrize("kind, name", [(ViT, "forward"), (ViT, "_pool"), (Float32Linear, "forward"), (nn.LayerNorm, "__call__")])
def test_any_class_of_the_model_may_be_patched_later(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    images, calls = random_images(made), list[str]()
    captured(made, images)
    before, real, replayed = made(images), getattr(kind, name), GraphClass.replayed
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, lambda self, *given: (calls.append(name), 2 * real(self, *given))[1])
        for _ in range(WARMUP_CALLS + 2):
            calls.clear()
            assert error(made(images), before) > 2 * CLOSE and calls
    assert GraphClass.replayed <= replayed + 1  # that one was thrown away
    captured(made, images)
    assert error(made(images), before) < CLOSE
