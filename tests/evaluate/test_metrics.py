"""Metrics against scikit-learn, scipy and plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from vitrail.evaluate import classification, multilabel, regression
from vitrail.evaluate.classification import Predictions, calibration, confusion_matrix, per_class, worst_confusions
from vitrail.evaluate.intervals import bootstrap, wilson

Array = npt.NDArray[Any]


def some_predictions(images: int = 300, classes: int = 7, seed: int = 0) -> tuple[Predictions, Array]:
    random = np.random.default_rng(seed)
    targets = random.choice(classes, size=images, p=random.dirichlet(np.ones(classes)))
    logits = random.normal(size=(images, classes)) + 1.5 * np.eye(classes)[targets]
    parts = torch.tensor(logits), torch.tensor(targets), torch.arange(images)
    return Predictions.from_logits(*parts), logits


@given(images=st.integers(1, 80), classes=st.integers(2, 9), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_classification_metrics_equal_scikit_learn(images: int, classes: int, seed: int) -> None:
    predictions, logits = some_predictions(images, classes, seed)
    targets, predicted, every = predictions.targets, predictions.predicted, list(range(classes))
    found = per_class(targets, predicted, classes)
    precision, recall, f1, support = sk.precision_recall_fscore_support(targets, predicted, labels=every, zero_division=0)
    for ours, theirs in ((found.precision, precision), (found.recall, recall), (found.f1, f1), (found.support, support)):
        assert np.allclose(ours, theirs)
    assert (confusion_matrix(targets, predicted, classes) == sk.confusion_matrix(targets, predicted, labels=every)).all()
    present = np.unique(targets)
    assert classification.balanced_accuracy(found) == pytest.approx(np.mean(recall[present]))
    assert classification.macro_f1(found) == pytest.approx(sk.f1_score(targets, predicted, average="macro", zero_division=0))
    for k in (1, min(3, classes)):
        expected = np.mean([t in np.argsort(-row, kind="stable")[:k] for t, row in zip(targets, logits, strict=True)])
        assert classification.top_k_accuracy(predictions, k) == pytest.approx(expected)
    assert predictions.nll.mean() == pytest.approx(sk.log_loss(targets, _softmax(logits), labels=every), rel=1e-4)


def test_all_scalar_metrics_have_intervals_around_them() -> None:
    predictions, _ = some_predictions(600, 8)
    values, intervals = classification.metrics(predictions, 8, resamples=200)
    assert set(values) == {"accuracy", "balanced_accuracy", "macro_f1", "nll", "ece", "top5_accuracy"}
    for name, (low, high) in intervals.items():
        assert low < high and (low <= values[name] <= high or name == "ece"), name  # resampling inflates a mean of |gaps|
    assert values["accuracy"] == pytest.approx(sk.accuracy_score(predictions.targets, predictions.predicted))
    assert classification.metrics(predictions, 8, resamples=50) == classification.metrics(predictions, 8, resamples=50)


def test_calibration_against_a_loop() -> None:
    random = np.random.default_rng(3)
    confidence = np.r_[random.uniform(0.1, 1, 500), 1.0, 0.2, 0.0]  # 0.2 is an edge of fifteen bins: it belongs to the lower bin
    correct = random.random(503) < confidence**2
    found = calibration(confidence, correct)
    ece, mce = 0.0, 0.0
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15) | ((confidence == 0) & (number == 0))
        assert found.count[number] == inside.sum()
        if inside.any():
            gap = abs(confidence[inside].mean() - correct[inside].mean())
            ece, mce = ece + gap * inside.mean(), max(mce, gap)
    assert found.ece == pytest.approx(ece) and found.mce == pytest.approx(mce)
    assert calibration(np.ones(9), np.ones(9, bool)).ece == 0


def test_sample_weights_equal_repeated_images() -> None:
    predictions, _ = some_predictions(60, 4)
    weights = np.random.default_rng(0).integers(0, 4, 60)
    twice = predictions.subset(np.repeat(np.arange(60), weights))
    ours, theirs = per_class(predictions.targets, predictions.predicted, 4, weights), per_class(twice.targets, twice.predicted, 4)
    assert np.allclose(ours.f1, theirs.f1) and np.allclose(ours.support, theirs.support)
    weighted = calibration(predictions.confidence, predictions.correct, weights=weights)
    assert weighted.ece == pytest.approx(calibration(twice.confidence, twice.correct).ece)


def test_worst_confusions_list_the_most_confident_errors() -> None:
    predictions, _ = some_predictions(2000, 5)
    worst = worst_confusions(predictions, 5, limit=3, examples=4)
    matrix = confusion_matrix(predictions.targets, predictions.predicted, 5)
    np.fill_diagonal(matrix, 0)
    assert [one.count for one in worst] == sorted(matrix.ravel(), reverse=True)[:3]
    for one in worst:
        assert matrix[one.true, one.predicted] == one.count and len(one.examples) == 4
        assert all(predictions.targets[row] == one.true and predictions.predicted[row] == one.predicted for row in one.examples)
        confidence = [predictions.confidence[row] for row in one.examples]
        assert confidence == sorted(confidence, reverse=True)
    assert worst_confusions(predictions.subset(np.flatnonzero(predictions.correct)), 5) == []


def test_sigmoid_probabilities_are_independent() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0]])
    predictions = Predictions.from_logits(logits, torch.tensor([1]), torch.tensor([0]), sigmoid=True)
    assert np.allclose(predictions.probabilities, [[0.880797, 0.731059, 0.268941]], atol=1e-6)
    assert predictions.nll[0] == pytest.approx(-np.log(0.731059), rel=1e-5)


def test_concat_restores_the_order_of_the_split() -> None:
    predictions, _ = some_predictions(50, 6)
    parts = [predictions.subset(np.arange(start, 50, 3)) for start in range(3)]
    again = Predictions.concat(parts)
    assert (again.indices == predictions.indices).all() and (again.top_classes == predictions.top_classes).all()


@given(total=st.integers(1, 500), data=st.data())
@settings(max_examples=100, deadline=None)
def test_wilson_equals_scipy(total: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, total))
    expected = stats.binomtest(hits, total).proportion_ci(0.95, method="wilson")
    assert wilson(hits, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_bootstrap_of_a_mean_equals_its_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    low, high = bootstrap(lambda w: float(w @ values / w.sum()), 2000, resamples=2000)
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 2000**0.5, rel=0.08)


@pytest.mark.slow
def test_multilabel_metrics_equal_scikit_learn() -> None:
    random = np.random.default_rng(5)
    truth = (random.random((400, 6)) < [0.5, 0.3, 0.1, 0.02, 0.7, 0.2]).astype(np.float32)
    scores = np.round(np.clip(0.3 * truth + random.uniform(0, 0.7, truth.shape), 0, 1), 2)  # rounded, so that there are ties
    thresholds = np.array([0.5, 0.4, 0.3, 0.5, 0.6, 0.45])
    found = multilabel.per_label(scores, truth, thresholds)
    predicted_labels = scores >= thresholds
    assert np.allclose(found.average_precision, sk.average_precision_score(truth, scores, average=None))
    precision, recall, f1, support = sk.precision_recall_fscore_support(truth, predicted_labels, average=None, zero_division=0)
    for ours, theirs in ((found.precision, precision), (found.recall, recall), (found.f1, f1), (found.support, support)):
        assert np.allclose(ours, theirs)
    values, intervals = multilabel.metrics(scores, truth, thresholds, resamples=100)
    assert values["f1_micro"] == pytest.approx(sk.f1_score(truth, predicted_labels, average="micro"))
    assert values["map"] == pytest.approx(sk.average_precision_score(truth, scores, average="macro"))
    assert values["exact_match"] == pytest.approx(sk.accuracy_score(truth, predicted_labels))
    assert all(low < values[name] < high for name, (low, high) in intervals.items())
    for k in range(6):  # no other threshold has a better F1
        best = sk.f1_score(truth[:, k], scores[:, k] >= found.best_threshold[k])
        assert best == pytest.approx(max(sk.f1_score(truth[:, k], scores[:, k] >= t) for t in np.unique(scores[:, k])))


def test_weighted_mean_average_precision_equals_repeated_images() -> None:
    random = np.random.default_rng(6)
    truth, scores = random.random((80, 3)) < 0.3, np.round(random.random((80, 3)), 1)
    weights = random.integers(0, 3, 80)
    rows = np.repeat(np.arange(80), weights)
    ranking = multilabel._Ranking(scores, truth)
    expected = sk.average_precision_score(truth[rows], scores[rows], average="macro")
    assert ranking.mean_average_precision(weights) == pytest.approx(expected)


def test_a_label_without_images_is_excluded_from_the_mean() -> None:
    truth = np.array([[1, 0], [0, 0], [1, 0]])
    scores = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    values, _ = multilabel.metrics(scores, truth, resamples=20)
    assert values["map"] == 1.0 and np.isnan(multilabel.per_label(scores, truth).average_precision[1])


def test_regression_metrics_equal_scikit_learn() -> None:
    random = np.random.default_rng(8)
    truth = random.normal(size=(300, 3)) * [1, 50, 0.1] + [0, 1000, 5]
    predicted = truth + random.normal(size=truth.shape) * [0.5, 20, 0.2]
    found = regression.per_target(predicted, truth)
    assert np.allclose(found.mae, sk.mean_absolute_error(truth, predicted, multioutput="raw_values"))
    assert np.allclose(found.r2, sk.r2_score(truth, predicted, multioutput="raw_values"))
    assert np.allclose(found.rmse, sk.root_mean_squared_error(truth, predicted, multioutput="raw_values"))
    values, intervals = regression.metrics(predicted, truth, resamples=200)
    assert values["mae"] == pytest.approx(sk.mean_absolute_error(truth, predicted))
    assert all(low < values[name] < high for name, (low, high) in intervals.items())
    constant = regression.per_target(predicted[:, :1], np.full((300, 1), 2.0))
    assert np.isnan(constant.r2[0]) and np.isfinite(constant.mae[0])


def _softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))
