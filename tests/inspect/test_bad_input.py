"""Clear messages for models and images that cannot be inspected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail
from tests.inspect.known_attention import images, tiny, trained
from vitrail import VitrailError, inspect
from vitrail.inspect.inputs import fitting_batch
from vitrail.models import model_config
from vitrail.models.vit import ViT

OF_IMAGES: list[Callable[..., Any]] = [
    inspect.rollout, inspect.gradient_rollout, inspect.token_similarity, inspect.attention_distance,
]  # fmt: skip


@pytest.mark.parametrize("function", OF_IMAGES)
def test_models_that_are_not_vits(function: Callable[..., Any]) -> None:
    with pytest.raises(VitrailError, match=r"torchvision\.VisionTransformer, not one of Vitrail's models.*vitrail\.load"):
        function(torchvision.models.VisionTransformer(32, 16, 1, 1, 16, 16), torch.zeros(1, 3, 32, 32))
    bit = vitrail.create_model("BiT-R50x1", image_size=64, layers=(1,), outputs=2)
    with pytest.raises(VitrailError, match=r"is a ResNet.*no attention"):
        function(bit, torch.zeros(1, 3, 64, 64))


@pytest.mark.parametrize("function", OF_IMAGES)
def test_images_that_do_not_fit(function: Callable[..., Any]) -> None:
    model = trained(tiny((3, 3)))
    for wrong, words in (
        (torch.zeros(1, 3, 25, 12), "expects 24×12 images, these are 25×12"),
        (torch.zeros(3, 24, 12), r"Add the batch axis"),
        (torch.zeros(1, 1, 24, 12), "3 input channels, these images have 1"),
        (torch.zeros(1, 3, 24, 12, dtype=torch.uint8), "floating-point"),
        (torch.zeros(0, 3, 24, 12), "No images were given"),
        ([], "No images were given"),
    ):
        with pytest.raises(VitrailError, match=words):
            function(model, wrong)
    with pytest.raises(VitrailError, match="NaN or infinity in the"):
        function(model, torch.full((1, 3, 24, 12), float("nan")))
    with pytest.raises(VitrailError, match="batch is 0"):
        function(model, images(model), batch=0)


def test_a_size_that_needs_padding_lists_the_nearest_valid_sizes() -> None:
    with pytest.raises(VitrailError, match=r"not a multiple of patch.*Nearest"):
        trained(tiny((3, 3))).resize((25, 13))


def test_layers_patches_and_outputs_that_do_not_exist() -> None:
    model = trained(tiny((3, 4)))
    with pytest.raises(VitrailError, match="Leave it out for all 3 layers"):
        inspect.attention_distance(model, images(model), layers=[])
    with pytest.raises(VitrailError, match="no layer 7"):
        inspect.head_attention(model, images(model), (0, 0), layers=[7])
    with pytest.raises(VitrailError, match="no patch in row 3, column 0: the grid is 3×4"):
        inspect.head_attention(model, images(model), (3, 0))
    with pytest.raises(VitrailError, match="no prefix token 1"):
        inspect.head_attention(model, images(model), 1)
    with pytest.raises(VitrailError, match="among is 'tokens'"):
        inspect.attention_distance(model, images(model), among="tokens")  # type: ignore[arg-type]
    with pytest.raises(VitrailError, match="one number from 0 to 4"):
        inspect.gradient_rollout(model, images(model), [0, 5])
    with pytest.raises(VitrailError, match="`outputs` has length 3 for 2 images"):
        inspect.gradient_rollout(model, images(model), [0, 1, 2])
    with pytest.raises(VitrailError, match="not as an iterable of batches"):
        inspect.gradient_rollout(model, iter([images(model)]), [0, 1])
    with pytest.raises(VitrailError, match="has no head"):
        inspect.gradient_rollout(trained_backbone(), images(model))


def trained_backbone() -> ViT:
    model = tiny((3, 4), outputs=0)
    torch.nn.init.normal_(model.norm.bias)
    return model


def test_untrained_and_zero_models_give_a_warning() -> None:
    fresh = tiny((3, 3))
    with pytest.warns(inspect.UntrainedWarning, match="untrained, as initialised: the figure is not meaningful"):
        inspect.rollout(fresh, images(fresh))
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.warns(inspect.UntrainedWarning, match="all zero"):
        maps = inspect.rollout(fresh, images(fresh))
    assert maps.std() < 1e-7
    with pytest.warns(inspect.UntrainedWarning, match="all zero"):
        assert (inspect.filters(fresh).explained_variance_ratio == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = trained(tiny((3, 3)))
        inspect.rollout(model, images(model))
    with pytest.raises(VitrailError, match="meta device"):
        inspect.filters(vitrail.create_model("B/16", device="meta"))


def test_two_steps_of_training_count_as_trained() -> None:
    model = tiny((2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):  # the head starts at zero: only the second step reaches the layers before it
        loss = torch.nn.functional.cross_entropy(model(images(model)), torch.tensor([0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert inspect.untrained(model) is None


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["Ti/16", "B/16", "L/16", "H/14", "B/8"]), st.integers(1, 60))
def test_a_batch_stays_within_the_memory_limit(name: str, side: int) -> None:
    patch = int(name.split("/")[1])
    with torch.device("meta"):
        model = ViT(model_config(name, image_size=side * patch, depth=2))  # type: ignore[arg-type]
    used = fitting_batch(model.config) * 4 * model.config.tokens**2 * (3 * model.config.heads + 2)
    assert fitting_batch(model.config) == 1 or used <= 2**30
