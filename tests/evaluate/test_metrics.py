"""Figures against scikit-learn, scipy and plain loops."""

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

from vitrail.evaluate import classification, labels, numbers
from vitrail.evaluate.classification import Answers, calibration, confusion_matrix, per_class, worst_confusions
from vitrail.evaluate.intervals import bootstrap, wilson

Array = npt.NDArray[Any]


def some_answers(images: int = 300, classes: int = 7, seed: int = 0) -> tuple[Answers, Array]:
    random = np.random.default_rng(seed)
    targets = random.choice(classes, size=images, p=random.dirichlet(np.ones(classes)))
    logits = random.normal(size=(images, classes)) + 1.5 * np.eye(classes)[targets]
    parts = torch.tensor(logits), torch.tensor(targets), torch.arange(images)
    return Answers.of(*parts), logits


@given(images=st.integers(1, 80), classes=st.integers(2, 9), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_classification_figures_are_scikit_learns(images: int, classes: int, seed: int) -> None:
    answers, logits = some_answers(images, classes, seed)
    targets, predicted, every = answers.targets, answers.predicted, list(range(classes))
    found = per_class(targets, predicted, classes)
    precision, recall, f1, support = sk.precision_recall_fscore_support(targets, predicted, labels=every, zero_division=0)
    for ours, theirs in ((found.precision, precision), (found.recall, recall), (found.f1, f1), (found.support, support)):
        assert np.allclose(ours, theirs)
    assert (confusion_matrix(targets, predicted, classes) == sk.confusion_matrix(targets, predicted, labels=every)).all()
    there = np.unique(targets)
    assert classification.balanced_accuracy(found) == pytest.approx(np.mean(recall[there]))
    assert classification.macro_f1(found) == pytest.approx(sk.f1_score(targets, predicted, average="macro", zero_division=0))
    for k in (1, min(3, classes)):
        expected = np.mean([t in np.argsort(-row, kind="stable")[:k] for t, row in zip(targets, logits, strict=True)])
        assert classification.top_k_accuracy(answers, k) == pytest.approx(expected)
    assert answers.nll.mean() == pytest.approx(sk.log_loss(targets, _softmax(logits), labels=every), rel=1e-4)


def test_all_scalar_figures_with_intervals_around_them() -> None:
    answers, _ = some_answers(600, 8)
    values, intervals = classification.figures(answers, 8, draws=200)
    assert set(values) == {"accuracy", "balanced_accuracy", "macro_f1", "nll", "ece", "top5_accuracy"}
    for name, (low, high) in intervals.items():
        assert low < high and (low <= values[name] <= high or name == "ece"), name  # resampling inflates a mean of |gaps|
    assert values["accuracy"] == pytest.approx(sk.accuracy_score(answers.targets, answers.predicted))
    assert classification.figures(answers, 8, draws=50) == classification.figures(answers, 8, draws=50)


def test_calibration_against_a_loop() -> None:
    random = np.random.default_rng(3)
    confidence = np.r_[random.uniform(0.1, 1, 500), 1.0, 0.2, 0.0]  # 0.2 is an edge of fifteen bins: it belongs below
    correct = random.random(503) < confidence**2
    found = calibration(confidence, correct)
    error, largest = 0.0, 0.0
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15) | ((confidence == 0) & (number == 0))
        assert found.count[number] == inside.sum()
        if inside.any():
            gap = abs(confidence[inside].mean() - correct[inside].mean())
            error, largest = error + gap * inside.mean(), max(largest, gap)
    assert found.error == pytest.approx(error) and found.largest == pytest.approx(largest)
    assert calibration(np.ones(9), np.ones(9, bool)).error == 0


def test_weights_mean_repetition() -> None:
    answers, _ = some_answers(60, 4)
    weights = np.random.default_rng(0).integers(0, 4, 60)
    twice = answers.subset(np.repeat(np.arange(60), weights))
    ours, theirs = per_class(answers.targets, answers.predicted, 4, weights), per_class(twice.targets, twice.predicted, 4)
    assert np.allclose(ours.f1, theirs.f1) and np.allclose(ours.support, theirs.support)
    weighted = calibration(answers.probability[:, 0], answers.correct, weights=weights)
    assert weighted.error == pytest.approx(calibration(twice.probability[:, 0], twice.correct).error)


def test_worst_confusions_name_the_surest_mistakes() -> None:
    answers, _ = some_answers(2000, 5)
    worst = worst_confusions(answers, 5, most=3, examples=4)
    matrix = confusion_matrix(answers.targets, answers.predicted, 5)
    np.fill_diagonal(matrix, 0)
    assert [one.count for one in worst] == sorted(matrix.ravel(), reverse=True)[:3]
    for one in worst:
        assert matrix[one.true, one.predicted] == one.count and len(one.examples) == 4
        assert all(answers.targets[row] == one.true and answers.predicted[row] == one.predicted for row in one.examples)
        sure = [answers.probability[row, 0] for row in one.examples]
        assert sure == sorted(sure, reverse=True)
    assert worst_confusions(answers.subset(np.flatnonzero(answers.correct)), 5) == []


def test_sigmoid_probabilities_are_each_class_own() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0]])
    answers = Answers.of(logits, torch.tensor([1]), torch.tensor([0]), sigmoid=True)
    assert np.allclose(answers.probability, [[0.880797, 0.731059, 0.268941]], atol=1e-6)
    assert answers.nll[0] == pytest.approx(-np.log(0.731059), rel=1e-5)


def test_joining_restores_the_order_of_the_split() -> None:
    answers, _ = some_answers(50, 6)
    parts = [answers.subset(np.arange(start, 50, 3)) for start in range(3)]
    again = Answers.joined(parts)
    assert (again.indices == answers.indices).all() and (again.top == answers.top).all()


@given(total=st.integers(1, 500), data=st.data())
@settings(max_examples=100, deadline=None)
def test_wilson_is_scipys(total: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, total))
    expected = stats.binomtest(hits, total).proportion_ci(0.95, method="wilson")
    assert wilson(hits, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_bootstrap_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    low, high = bootstrap(lambda w: float(w @ values / w.sum()), 2000, draws=2000)
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 2000**0.5, rel=0.08)


def test_multilabel_figures_are_scikit_learns() -> None:
    random = np.random.default_rng(5)
    truth = (random.random((400, 6)) < [0.5, 0.3, 0.1, 0.02, 0.7, 0.2]).astype(np.float32)
    scores = np.round(np.clip(0.3 * truth + random.uniform(0, 0.7, truth.shape), 0, 1), 2)  # rounded, so that scores tie
    thresholds = np.array([0.5, 0.4, 0.3, 0.5, 0.6, 0.45])
    found = labels.per_label(scores, truth, thresholds)
    given_labels = scores >= thresholds
    assert np.allclose(found.average_precision, sk.average_precision_score(truth, scores, average=None))
    precision, recall, f1, support = sk.precision_recall_fscore_support(truth, given_labels, average=None, zero_division=0)
    for ours, theirs in ((found.precision, precision), (found.recall, recall), (found.f1, f1), (found.support, support)):
        assert np.allclose(ours, theirs)
    values, intervals = labels.figures(scores, truth, thresholds, draws=100)
    assert values["f1_micro"] == pytest.approx(sk.f1_score(truth, given_labels, average="micro"))
    assert values["map"] == pytest.approx(sk.average_precision_score(truth, scores, average="macro"))
    assert values["exact_match"] == pytest.approx(sk.accuracy_score(truth, given_labels))
    assert all(low < values[name] < high for name, (low, high) in intervals.items())
    for k in range(6):  # no other threshold has a better F1
        best = sk.f1_score(truth[:, k], scores[:, k] >= found.best_threshold[k])
        assert best == pytest.approx(max(sk.f1_score(truth[:, k], scores[:, k] >= t) for t in np.unique(scores[:, k])))


def test_weighted_mean_average_precision_is_that_of_repeated_images() -> None:
    random = np.random.default_rng(6)
    truth, scores = random.random((80, 3)) < 0.3, np.round(random.random((80, 3)), 1)
    weights = random.integers(0, 3, 80)
    rows = np.repeat(np.arange(80), weights)
    ranking = labels._Ranking(scores, truth)
    expected = sk.average_precision_score(truth[rows], scores[rows], average="macro")
    assert ranking.mean_average_precision(weights) == pytest.approx(expected)


def test_a_label_nobody_has_is_left_out_of_the_mean() -> None:
    truth = np.array([[1, 0], [0, 0], [1, 0]])
    scores = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    values, _ = labels.figures(scores, truth, draws=20)
    assert values["map"] == 1.0 and np.isnan(labels.per_label(scores, truth).average_precision[1])


def test_regression_figures_are_scikit_learns() -> None:
    random = np.random.default_rng(8)
    truth = random.normal(size=(300, 3)) * [1, 50, 0.1] + [0, 1000, 5]
    predicted = truth + random.normal(size=truth.shape) * [0.5, 20, 0.2]
    found = numbers.per_target(predicted, truth)
    assert np.allclose(found.mae, sk.mean_absolute_error(truth, predicted, multioutput="raw_values"))
    assert np.allclose(found.r2, sk.r2_score(truth, predicted, multioutput="raw_values"))
    assert np.allclose(found.rmse, sk.root_mean_squared_error(truth, predicted, multioutput="raw_values"))
    values, intervals = numbers.figures(predicted, truth, draws=200)
    assert values["mae"] == pytest.approx(sk.mean_absolute_error(truth, predicted))
    assert all(low < values[name] < high for name, (low, high) in intervals.items())
    constant = numbers.per_target(predicted[:, :1], np.full((300, 1), 2.0))
    assert np.isnan(constant.r2[0]) and np.isfinite(constant.mae[0])


def _softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))
