"""Rollout and attention distance of models with known attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail
from tests.inspect.known_attention import STRIDE, grid_mean_distance, images, one_hot, shifted, tiny, trained, uniform
from vitrail import inspect
from vitrail.models import ViT

KINDS: dict[int, dict[str, Any]] = {
    0: {"pooling": "mean"},
    1: {},
    5: {"registers": 4},
}
GRIDS = [(4, 4), (3, 5), (6, 2)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", KINDS)
def test_uniform_attention_rolls_out_to_a_uniform_map(grid: tuple[int, int], prefix: int) -> None:
    model = uniform(grid, **KINDS[prefix])
    maps = inspect.rollout(model, images(model))
    patches, tokens = grid[0] * grid[1], prefix + grid[0] * grid[1]
    # From a prefix token, all but 2⁻ᴸ is spread evenly over all tokens. Without prefix tokens, the mean over patches stays uniform.
    expected = 1 / patches if prefix == 0 else (1 - 0.5**model.config.depth) / tokens
    assert maps.shape == (2, *grid)
    np.testing.assert_allclose(maps, expected, rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", KINDS)
def test_uniform_attention_has_the_mean_distance_of_the_grid(grid: tuple[int, int], prefix: int) -> None:
    model = uniform(grid, **KINDS[prefix])
    expected, patches = grid_mean_distance(grid), grid[0] * grid[1]
    among = inspect.attention_distance(model, images(model))
    everything = inspect.attention_distance(model, images(model), among="all")
    assert among.shape == (model.config.depth, model.config.heads)
    np.testing.assert_allclose(among, expected, rtol=1e-5)
    np.testing.assert_allclose(everything, expected * patches / (patches + prefix), rtol=1e-5)
    assert inspect.uniform_distance(model.config) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("prefix", KINDS)
def test_identity_attention_has_distance_zero(prefix: int) -> None:
    model = one_hot((3, 4), [lambda token: token] * 2, prefix=prefix, **KINDS[prefix])
    assert (inspect.attention_distance(model, images(model)) == 0).all()
    maps = inspect.rollout(model, images(model))
    np.testing.assert_allclose(maps, 1 / 12 if prefix == 0 else 0.0, rtol=1e-6)


@pytest.mark.parametrize("prefix", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (0, 2), (2, 1)])
def test_shifted_attention_has_the_distance_of_the_shift(prefix: int, rows: int, columns: int) -> None:
    grid = (4, 5)
    targets = [shifted(grid, rows, columns, prefix), lambda token: token]
    model = one_hot(grid, targets, prefix=prefix, **KINDS[prefix])
    found = inspect.attention_distance(model, images(model))
    np.testing.assert_allclose(found[:, 0], math.hypot(rows * STRIDE[0], columns * STRIDE[1]), rtol=1e-6)
    assert (found[:, 1] == 0).all()


def test_patches_that_attend_only_to_the_class_token_have_distance_zero() -> None:
    model = one_hot((3, 3), [lambda token: 0], prefix=1)
    for among in ("patches", "all"):
        assert (inspect.attention_distance(model, images(model), among=among) == 0).all()  # type: ignore[arg-type]


def test_rollout_follows_a_path_and_halves_at_every_residual() -> None:
    """The class token attends to patch 4, every patch to itself: each layer moves half of the weight there."""
    model = one_hot((3, 3), [lambda token: 5 if token == 0 else token], prefix=1)
    maps = inspect.rollout(model, images(model))
    expected = np.zeros((3, 3))
    expected[1, 1] = 1 - 0.5**model.config.depth
    np.testing.assert_allclose(maps, np.stack([expected, expected]), atol=1e-6)


def test_rollout_of_a_distilled_model_starts_from_both_tokens() -> None:
    """The class token attends to the first patch, the distillation token to the last."""
    model = one_hot((2, 2), [lambda token: {0: 2, 1: 5}.get(token, token)], prefix=2, distill_token=True)
    weight = (1 - 0.5**model.config.depth) / 2
    np.testing.assert_allclose(inspect.rollout(model, images(model, 1))[0], [[weight, 0], [0, weight]], atol=1e-6)


def test_head_attention_shows_the_target_of_each_head() -> None:
    grid = (3, 4)
    model = one_hot(grid, [shifted(grid, 1, 0, 1), lambda token: 1], prefix=1)
    found = inspect.head_attention(model, images(model, 1), (0, 2), layers=[0, -1])
    assert found.shape == (1, 2, 2, 3, 4)
    for layer in range(2):
        assert found[0, layer, 0, 1, 2] == pytest.approx(1) and found[0, layer, 1, 0, 0] == pytest.approx(1)
    of_class = inspect.head_attention(model, images(model, 1), 0)
    assert of_class[0, 0, 0].sum() == pytest.approx(0, abs=1e-6) and of_class[0, 0, 1, 0, 0] == pytest.approx(1)


def test_the_distance_of_a_hybrid_is_in_pixels_of_the_input() -> None:
    """The stem's map has a stride of 4 and a patch covers 8×8 of it: a token stands for 32 pixels."""
    model = vitrail.create_model("R+ViT-Ti/16", image_size=(64, 96), depth=1, outputs=2, seed=0)
    assert isinstance(model, ViT) and model.config.grid == (2, 3)
    torch.nn.init.normal_(model.norm.bias)
    torch.nn.init.zeros_(model.blocks[0].attention.qkv.weight)
    found = inspect.attention_distance(model, images(model))
    np.testing.assert_allclose(found, grid_mean_distance((2, 3), (32, 32)), rtol=1e-5)
    assert inspect.rollout(model, images(model)).shape == (2, 2, 3)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([0, 1, 5]))
def test_weights_sum_to_at_most_one_on_any_grid(rows: int, columns: int, prefix: int) -> None:
    model = trained(tiny((rows, columns), depth=2, **KINDS[prefix]))
    maps = inspect.rollout(model, images(model))
    assert maps.shape == (2, rows, columns) and (maps >= 0).all()
    assert (maps.sum(axis=(1, 2)) <= 1 + 1e-5).all()
    if prefix == 0:
        np.testing.assert_allclose(maps.sum(axis=(1, 2)), 1, rtol=1e-5)
    far = inspect.attention_distances(model, images(model))
    assert (far["all"] <= far["patches"] + 1e-4).all()
    assert (far["patches"] <= math.hypot((rows - 1) * STRIDE[0], (columns - 1) * STRIDE[1]) + 1e-4).all()
