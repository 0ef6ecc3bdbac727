"""Filters and position similarity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

import vitrail
from tests.inspect.known_attention import tiny, trained
from vitrail import VitrailError, inspect


def test_filters_are_the_principal_components_of_the_patch_embedding() -> None:
    model = trained(tiny((2, 2), width=160))
    found = inspect.filters(model)
    weight = model.patches.weight.detach().double().numpy()
    assert found.components.shape == (28, 3, 8, 4) and found.raw.shape == weight.shape
    np.testing.assert_allclose(found.raw, weight, rtol=1e-6)
    reference = PCA(28, svd_solver="full").fit(weight.reshape(160, -1))
    np.testing.assert_allclose(found.explained_variance_ratio, reference.explained_variance_ratio_, rtol=1e-5)
    cosines = np.abs((found.components.reshape(28, -1) * reference.components_).sum(axis=1))
    np.testing.assert_allclose(cosines, 1, atol=1e-5)
    flat = found.components.reshape(28, -1)
    assert (flat[np.arange(28), np.abs(flat).argmax(axis=1)] > 0).all()


def test_there_are_at_most_as_many_components_as_filters() -> None:
    model = trained(tiny((2, 2), width=12, heads=2))
    assert len(inspect.filters(model).components) == 12
    assert len(inspect.filters(model, 3).components) == 3
    with pytest.raises(VitrailError, match="components is 0"):
        inspect.filters(model, 0)


@pytest.mark.parametrize("name", ["R26+ViT-S/32", "BiT-R50x1"])
def test_hybrids_and_resnets_show_the_first_convolution(name: str) -> None:
    small = {"layers": (1,), **({"depth": 1} if "ViT" in name else {})}
    model = vitrail.create_model(name, image_size=64, outputs=3, seed=0, **small)
    torch.nn.init.normal_(next(module for module in model.modules() if isinstance(module, torch.nn.GroupNorm)).bias)
    found = inspect.filters(model)
    assert found.raw.shape == (64, 3, 7, 7) and found.components.shape == (28, 3, 7, 7)
    np.testing.assert_allclose(found.raw.mean(axis=(1, 2, 3)), 0, atol=1e-6)  # standardised, as applied
    np.testing.assert_allclose(found.raw.std(axis=(1, 2, 3)), 1, atol=1e-3)


def test_position_similarity_is_the_cosine_of_position_embeddings() -> None:
    model = trained(tiny((3, 4), registers=2))
    found = inspect.position_similarity(model)
    table = model.positions.table.detach().double().numpy()[0, 3:]
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    np.testing.assert_allclose(found.reshape(12, 12), unit @ unit.T, atol=1e-6)
    assert found.shape == (3, 4, 3, 4)
    np.testing.assert_allclose(found[2, 3, 2, 3], 1, rtol=1e-6)


@pytest.mark.parametrize("position", ["learned-2d", "sincos2d"])
def test_other_kinds_of_position_embeddings(position: str) -> None:
    model = trained(tiny((3, 4), position=position))
    found = inspect.position_similarity(model)
    np.testing.assert_allclose(found.reshape(12, 12).diagonal(), 1, rtol=1e-5)
    # All patches of a row have the same row part, so (0, 0) and (0, 2) are as similar as (1, 0) and (1, 2), up to their norms.
    if position == "sincos2d":
        np.testing.assert_allclose(found[0, 0, 0, 2], found[1, 0, 1, 2], rtol=1e-5)


def test_every_layer_can_have_its_own_positions() -> None:
    model = trained(tiny((3, 3), position_at="every-layer"))
    assert not np.allclose(inspect.position_similarity(model, 0), inspect.position_similarity(model, 2))
    with pytest.raises(VitrailError, match="3 position embeddings"):
        inspect.position_similarity(model, 3)


@pytest.mark.parametrize(("position", "words"), [("none", "no position embedding"), ("relative", "relative positions")])
def test_models_without_position_vectors_give_a_clear_message(position: str, words: str) -> None:
    with pytest.raises(VitrailError, match=words):
        inspect.position_similarity(trained(tiny((3, 3), position=position)))


def test_zero_positions_give_zero_similarity() -> None:
    model = trained(tiny((2, 2)))
    torch.nn.init.zeros_(model.positions.table)
    assert (inspect.position_similarity(model) == 0).all()
