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
from vitrail.evaluate.intervals import bootstrap, share_interval
from vitrail.tasks import Classify
from vitrail.wilson import wilson

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
    assert values["ece"] == calibration(predictions.confidence, predictions.correct).ece
    assert set(values) - set(intervals) == {"ece"}  # noise only increases a mean of |gaps|, so resampled values lie above it
    for name, (low, high) in intervals.items():
        assert low < values[name] < high, name
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
    assert predictions.predicted[0] == 0 and predictions.confidence[0] == pytest.approx(0.880797, rel=1e-5)
    assert predictions.nll[0] == pytest.approx(-np.log([1 - 0.880797, 0.731059, 1 - 0.268941]).sum(), rel=1e-5)


@given(classes=st.integers(2, 12), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_likelihood_of_sigmoids_is_a_proper_score(classes: int, seed: int) -> None:
    """The true probabilities have the best expected value, and a yes to everything is bad."""
    random = np.random.default_rng(seed)
    truth = random.dirichlet(np.ones(classes)).clip(1e-3, 1 - 1e-3)

    def expected(probabilities: Array) -> float:
        logits = torch.tensor(np.log(probabilities / (1 - probabilities)), dtype=torch.float32).repeat(classes, 1)
        every = torch.arange(classes)
        return float(truth @ Predictions.from_logits(logits, every, every, sigmoid=True).nll)

    other = random.uniform(0.01, 0.99, classes)
    assert expected(truth) <= expected(other) + 1e-5 and expected(truth) < expected(np.full(classes, 0.999))
    labels = np.eye(classes)
    losses = [sk.log_loss(labels[:, k], np.full(classes, other[k]), labels=[0, 1]) for k in range(classes)]
    uniform = float(np.mean([-np.log(np.where(labels[k], other, 1 - other)).sum() for k in range(classes)]))
    assert uniform == pytest.approx(np.sum(losses), rel=1e-6)
    logits = torch.tensor(np.log(other / (1 - other)), dtype=torch.float32).repeat(classes, 1)
    found = Predictions.from_logits(logits, torch.arange(classes), torch.arange(classes), sigmoid=True).nll.mean()
    assert found == pytest.approx(np.sum(losses), rel=1e-4)


@given(classes=st.integers(2, 12), k=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_equal_scores_count_as_misses_in_any_order_of_classes(classes: int, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    scores, targets = random.integers(0, 3, (20, classes)), random.integers(0, classes, 20)
    order = random.permutation(classes)
    found = Predictions.from_logits(torch.tensor(scores), torch.tensor(targets), torch.arange(20))
    other = Predictions.from_logits(torch.tensor(scores[:, order]), torch.tensor(np.argsort(order)[targets]), torch.arange(20))
    assert (found.ranks == other.ranks).all() and (found.correct == (found.predicted == targets)).all()
    assert (scores[np.arange(20), found.predicted] == scores.max(1)).all()
    ours = found.ranks < k
    if classes > 2 and k < classes:
        # scikit-learn breaks ties by the order of classes: never below ours, and equal where the true class has no equal.
        labels = list(range(classes))
        theirs = [sk.top_k_accuracy_score([t], [row], k=k, labels=labels) for t, row in zip(targets, scores, strict=True)]
        alone = (scores == scores[np.arange(20), targets][:, None]).sum(1) == 1
        assert (ours <= np.array(theirs)).all() and (ours == np.array(theirs))[alone].all()


def test_constant_outputs_are_never_right() -> None:
    logits, targets = torch.zeros(4, 10), torch.tensor([0, 1, 2, 9])
    constant = Predictions.from_logits(logits, targets, torch.arange(4))
    values, _ = classification.metrics(constant, 10, resamples=10)
    assert values["accuracy"] == values["top5_accuracy"] == values["balanced_accuracy"] == values["macro_f1"] == 0
    meter = Classify(10).meter()
    meter.update(logits, targets)
    assert meter.metrics()["accuracy"] == meter.metrics()["top5_accuracy"] == 0
    meter.update(torch.full((4, 10), torch.nan), targets)
    assert meter.metrics()["top5_accuracy"] == 0


def test_concat_restores_the_order_of_the_split() -> None:
    predictions, _ = some_predictions(50, 6)
    parts = [predictions.subset(np.arange(start, 50, 3)) for start in range(3)]
    again = Predictions.concat(parts)
    assert (again.indices == predictions.indices).all() and (again.predicted == predictions.predicted).all()


@given(images=st.integers(1, 40), classes=st.integers(2, 9), right=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_every_interval_contains_its_metric_and_is_never_a_point(images: int, classes: int, right: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    targets = random.integers(0, classes, images)
    logits = torch.tensor(random.normal(size=(images, classes)) + 50 * right * np.eye(classes)[targets])
    found = Predictions.from_logits(logits, torch.tensor(targets), torch.arange(images))
    truth = np.eye(classes)[targets]
    results = [
        classification.metrics(found, classes, resamples=30),
        multilabel.metrics(logits.sigmoid().numpy(), truth, resamples=30),
        regression.metrics(logits.numpy(), truth, resamples=30),
    ]
    for values, intervals in results:
        for name, (low, high) in intervals.items():
            bounded = name not in ("nll", "mae", "rmse", "r2")
            if np.isnan(low):  # no spread in the resamples, such as those of one image
                assert np.isnan(values[name]) or not bounded
            else:
                assert low <= values[name] <= high and low < high and (not bounded or 0 <= low < high <= 1), name
            assert images < 10 or right or not np.isnan(low) or np.isnan(values[name]), name


def test_six_correct_images_are_not_a_hundred_per_cent_for_certain() -> None:
    targets = np.array([0, 0, 1, 1, 2, 2])
    right = Predictions.from_logits(torch.eye(3)[targets] * 9, torch.tensor(targets), torch.arange(6))
    _, intervals = classification.metrics(right, 3)
    expected = stats.binomtest(6, 6).proportion_ci(0.95, method="wilson")
    for name in ("accuracy", "balanced_accuracy", "macro_f1"):
        assert intervals[name] == pytest.approx((expected.low, 1.0)), name
    _, intervals = multilabel.metrics(np.eye(3)[targets], np.eye(3)[targets])
    for name in ("map", "f1_micro", "f1_macro", "exact_match"):
        assert intervals[name] == pytest.approx((expected.low, 1.0)), name


def test_a_rare_class_makes_a_mean_over_classes_uncertain() -> None:
    targets = np.array([0] * 999 + [1])
    right = Predictions.from_logits(torch.eye(2)[targets] * 9, torch.tensor(targets), torch.arange(1000))
    _, intervals = classification.metrics(right, 2, resamples=20)
    assert intervals["accuracy"][0] > 0.99 and intervals["balanced_accuracy"][0] < 0.6


def test_the_interval_of_a_share_is_wilsons_and_covers() -> None:
    """For a plain proportion the effective size is the number of images; for F1 it covers the truth about as often as it says."""
    random = np.random.default_rng(0)
    hits = random.random(200) < 0.8
    found = share_interval(hits.mean(), lambda w: float(w @ hits / 200), 200, resamples=4000)
    assert found == pytest.approx(wilson(hits.sum(), 200), abs=0.006)
    covered = 0
    for _ in range(100):
        targets = random.integers(0, 2, 60)
        predicted = np.where(random.random(60) < 0.85, targets, 1 - targets)  # the true macro F1 is 0.85
        scores = per_class(targets, predicted, 2)
        low, high = share_interval(
            classification.macro_f1(scores),
            lambda w, t=targets, p=predicted: classification.macro_f1(per_class(t, p, 2, w)),  # type: ignore[misc]
            60,
            groups=scores.support,
            resamples=60,
        )
        covered += low <= 0.85 <= high
    assert covered >= 88


@given(total=st.integers(1, 500), data=st.data())
@settings(max_examples=100, deadline=None)
def test_wilson_equals_scipy(total: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, total))
    expected = stats.binomtest(hits, total).proportion_ci(0.95, method="wilson")
    assert wilson(hits, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_bootstrap_of_a_mean_equals_its_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    low, high = bootstrap(values.mean(), lambda w: float(w @ values / w.sum()), 2000, resamples=2000)
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
