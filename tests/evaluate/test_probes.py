"""Probes against scikit-learn, and the choice of l2 and k."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from vitrail.checkpoints import Bundle, load
from vitrail.errors import VitrailError
from vitrail.evaluate import FeatureSpec, ProbeSpec, probe
from vitrail.evaluate.probes import _accuracies, choose, fit_logistic, knn


def problem(images: int = 300, features: int = 12, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    y = random.integers(classes, size=images)
    x = random.normal(size=(classes, features))[y] + 1.3 * random.normal(size=(images, features))
    return torch.from_numpy(x).float(), torch.from_numpy(y)


@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-4])
def test_logistic_regression_equals_scikit_learn(l2: float) -> None:
    x, y = problem()
    fitted = fit_logistic(x, y, 4, l2)
    theirs = LogisticRegression(C=1 / (len(x) * l2), tol=1e-8, max_iter=5000).fit(x.double().numpy(), y.numpy())
    ours = (x @ fitted[:-1] + fitted[-1]).softmax(1).numpy()
    assert np.abs(ours - theirs.predict_proba(x.double().numpy())).max() < 2e-3
    again = fit_logistic(x, y, 4, l2, start=fitted)  # a converged solution stays where it is
    assert (again - fitted).abs().max() < 1e-2


def test_knn_equals_scikit_learn() -> None:
    x, y = problem()
    test, _ = problem(seed=1)
    weights = lambda distance: np.exp(-distance / 0.07)  # noqa: E731
    theirs = KNeighborsClassifier(15, metric="cosine", algorithm="brute", weights=weights).fit(x.numpy(), y.numpy())
    assert (knn(x, y, test, 4, 15, 0.07).argmax(1).numpy() == theirs.predict(test.numpy())).mean() > 0.99
    assert torch.equal(knn(x, y, x, 4, 1, 0.07).argmax(1), y)


@pytest.mark.parametrize("spec", [ProbeSpec(method="knn"), ProbeSpec()], ids=["knn", "logistic"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_equal_scores_are_misses_in_any_order_of_classes(spec: ProbeSpec, order: tuple[int, int]) -> None:
    y = torch.tensor(order)
    x = torch.ones(2, 3)  # equal features, so equal scores
    candidates = (2.0,) if spec.method == "knn" else (1e-2,)
    assert [score for score, _ in _accuracies(x, y, x, y, 2, spec, candidates)] == [0.0]


def test_the_best_held_out_candidate_is_chosen() -> None:
    x, y = problem(120, 60)
    out = np.arange(0, 120, 4)
    chosen, found = choose(x, y, 4, ProbeSpec(l2=(10.0, 1e-1, 1e-7), standardise=False), out)
    assert set(found) == {10.0, 1e-1, 1e-7} and found[chosen] == max(found.values())
    kept = np.setdiff1d(np.arange(120), out)
    fitted = fit_logistic(x[kept], y[kept], 4, 1e-1)
    expected = ((x[out] @ fitted[:-1] + fitted[-1]).argmax(1) == y[out]).double().mean()
    assert found[1e-1] == pytest.approx(float(expected), abs=0.04)
    assert choose(x, y, 4, ProbeSpec(l2=(0.5,)), out) == (0.5, {})


def test_a_probe_from_images_to_score(bundle: Bundle, backbone: Path, photos: Path) -> None:
    found = probe(bundle, f"folder:{photos}", spec=ProbeSpec(l2=(1.0, 1e-2)))
    saved = json.loads(json.dumps(found.to_dict()))
    assert found.accuracy > 0.5 and found.images == 36 and found.train_images == 48
    assert saved["features"] == {"feature": "pre_logits", "layer": None, "norm": True} and saved["probe"]["standardise"] is True
    assert set(saved["validation"]) == {"1", "0.01"} and saved["chosen"] in (1.0, 0.01)
    low = probe(
        load(backbone), f"folder:{photos}", spec=ProbeSpec(method="knn"), features=FeatureSpec(feature="mean", layer=0, norm=False)
    )
    assert low.features.layer == 0 and low.chosen in low.spec.neighbours


def test_impossible_probes_give_clear_messages(bundle: Bundle, photos: Path) -> None:
    with pytest.raises(VitrailError, match="values above 0"):
        ProbeSpec(l2=(0.0,))
    with pytest.raises(VitrailError, match="fraction between 0 and 1"):
        ProbeSpec(holdout=0.0)
    with pytest.raises(VitrailError, match="one vector per image"):
        probe(bundle, f"folder:{photos}", features=FeatureSpec(feature="patches"))
    with torch.no_grad():
        bundle.model.norm.bias[3] = float("inf")
    with pytest.raises(VitrailError, match="features of 48 of 48 images contain NaN or infinity"):
        probe(bundle, f"folder:{photos}")
