"""The closed form against an independent numpy solution, and the drawing of support sets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import VitrailError
from vitrail.evaluate.ridge import fit_ridge, ridge_scores
from vitrail.evaluate.support_set import draw_support_sets

Array = npt.NDArray[Any]


def by_least_squares(x: Array, y: Array, x_test: Array, classes: int, l2: float = 1024.0, bias: float = 100.0) -> Array:
    """Solve the same problem differently: ridge is least squares with rows √λ·I appended to the data."""
    x, x_test = x.astype(np.float64), x_test.astype(np.float64)
    mean, std = x.mean(0), x.std(0) + 1e-5
    x = np.c_[(x - mean) / std, np.full(len(x), bias)]
    x_test = np.c_[(x_test - mean) / std, np.full(len(x_test), bias)]
    targets = np.where(np.arange(classes) == y[:, None], 1.0, -1.0)
    rows = np.r_[x, np.sqrt(l2) * np.eye(x.shape[1])]
    weights, *_ = np.linalg.lstsq(rows, np.r_[targets, np.zeros((x.shape[1], classes))], rcond=None)
    return np.asarray(x_test @ weights)


def problem(images: int, features: int, classes: int, seed: int = 0) -> tuple[Array, Array, Array]:
    random = np.random.default_rng(seed)
    y = np.arange(images) % classes
    centres = random.normal(size=(classes, features))
    scale, shift = random.uniform(0.01, 30, features), random.normal(size=features) * 5
    x = (centres[y] + random.normal(size=(images, features))) * scale + shift
    test = (centres[random.integers(classes, size=40)] + random.normal(size=(40, features))) * scale + shift
    return x.astype(np.float32), y, test.astype(np.float32)


@pytest.mark.parametrize(
    ("images", "features"), [(300, 64), (65, 64), (64, 64), (63, 64), (20, 192), (5000, 48)], ids=lambda n: str(n)
)
def test_both_forms_equal_least_squares(images: int, features: int) -> None:
    x, y, test = problem(images, features, 5)
    expected = by_least_squares(x, y, test, 5)
    assert np.abs(ridge_scores(x, y, test, 5).numpy() - expected).max() < 1e-9
    assert np.abs(ridge_scores(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(test), 5).numpy() - expected).max() < 1e-9


@given(
    images=st.integers(2, 40),
    features=st.integers(1, 40),
    classes=st.integers(2, 6),
    l2=st.sampled_from([1e-2, 1.0, 1024.0, 1e6]),
    bias=st.sampled_from([0.0, 1.0, 100.0]),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_and_penalty(images: int, features: int, classes: int, l2: float, bias: float) -> None:
    x, y, test = problem(images, features, classes, seed=images * 41 + features)
    found = ridge_scores(x, y, test, classes, l2=l2, bias=bias).numpy()
    assert np.abs(found - by_least_squares(x, y, test, classes, l2, bias)).max() < 1e-4


def test_a_constant_feature_and_an_unseen_class_are_harmless() -> None:
    x, y, test = problem(50, 8, 4)
    x[:, 3] = test[:, 3] = 7.0
    found = ridge_scores(x, y, test, 6).numpy()  # classes 4 and 5 have no image
    assert np.isfinite(found).all() and found[:, 4:].max() < found[:, :4].max(1).min()
    assert np.abs(found - by_least_squares(x, y, test, 6)).max() < 1e-6


def test_a_prediction_is_the_largest_score() -> None:
    x, y, test = problem(400, 16, 5)
    fitted = fit_ridge(x, y, 5)
    many = np.concatenate([test] * 250)  # more rows than one chunk
    targets = np.arange(len(many)) % 5
    assert fitted.accuracy(many, targets) == float((fitted.scores(many).argmax(1).numpy() == targets).mean())


def test_equal_scores_are_misses() -> None:
    x, y, test = problem(40, 6, 4)
    fitted = fit_ridge(x, y, 4)
    constant = dataclasses.replace(fitted, weights=torch.zeros_like(fitted.weights))
    assert [constant.accuracy(test, np.full(len(test), k)) for k in range(4)] == [0.0] * 4


def test_bad_input_gives_clear_messages() -> None:
    x, y, test = problem(30, 8, 3)
    corrupted = x.copy()
    corrupted[[4, 9], 2] = np.nan
    with pytest.raises(VitrailError, match=r"NaN or infinity in 2 of 30 rows of the support features \(the first is row 4\)"):
        ridge_scores(corrupted, y, test, 3)
    with pytest.raises(VitrailError, match=r"NaN or infinity in .* of the test features"):
        ridge_scores(x, y, np.full_like(test, np.inf), 3)
    with pytest.raises(VitrailError, match="Label 2 in row 2 is out of range; the classes are 0 to 1"):
        ridge_scores(x, y, test, 2)
    with pytest.raises(VitrailError, match="7 channels, the support features 8"):
        ridge_scores(x, y, test[:, :7], 3)
    with pytest.raises(VitrailError, match="l2 is 0"):
        ridge_scores(x, y, test, 3, l2=0)
    with pytest.raises(VitrailError, match="empty"):
        ridge_scores(x[:0], y[:0], test, 3)


CLASSES = ("ant", "bee", "cat", "dog")


def test_exactly_k_of_each_class_nested_within_a_seed() -> None:
    targets = np.random.default_rng(1).integers(4, size=400)
    support_sets = {(one.shots, one.seed): one for one in draw_support_sets(targets, CLASSES, shots=(1, 5, 25), seeds=(0, 1, 2))}
    for (shots, seed), one in support_sets.items():
        assert np.bincount(targets[one.indices]).tolist() == [shots] * 4
        assert len(set(one.indices.tolist())) == 4 * shots and not len(one.dropped)
        assert set(one.indices.tolist()) <= set(support_sets[25, seed].indices.tolist())
    assert set(support_sets[5, 0].indices.tolist()) != set(support_sets[5, 1].indices.tolist())
    again = draw_support_sets(targets, CLASSES, shots=(5,), seeds=(1,))[0]
    assert again.indices.tolist() == support_sets[5, 1].indices.tolist()  # other numbers of shots do not change the draw


def test_the_draw_equals_the_reference_code() -> None:
    targets = np.array([0, 1, 0, 1, 0, 1, 0, 0])
    generator = np.random.default_rng(7)
    expected = [*generator.permutation([0, 2, 4, 6, 7])[:2], *generator.permutation([1, 3, 5])[:2]]
    assert draw_support_sets(targets, ("a", "b"), shots=(2,), seeds=(7,))[0].indices.tolist() == expected


def test_classes_with_too_few_images_are_an_error_or_are_dropped() -> None:
    targets = np.repeat([0, 1, 3], [10, 3, 8])  # class 2 has no image: it is ignored
    with pytest.raises(VitrailError, match=r"Class 'bee' has 3 images, fewer than 5 shots.*--small-classes drop"):
        draw_support_sets(targets, CLASSES, shots=(1, 5), seeds=(0,))
    one, five = draw_support_sets(targets, CLASSES, shots=(1, 5), seeds=(0,), small_classes="drop")
    assert one.classes.tolist() == [0, 1, 3] and five.classes.tolist() == [0, 3] and five.dropped.tolist() == [1]
    with pytest.raises(VitrailError, match="Classes with at least 9 images: 1 of 3"):
        draw_support_sets(targets, CLASSES, shots=(9,), seeds=(0,), small_classes="drop")
    with pytest.raises(VitrailError, match="1 or more"):
        draw_support_sets(targets, CLASSES, shots=(0,), seeds=(0,))
