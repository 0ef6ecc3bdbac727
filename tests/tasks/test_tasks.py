"""Losses and metrics against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.tasks import Classify, Distill, MultiLabel, Regress
from vitrail.tasks.multilabel import average_precision, best_threshold

chance = np.random.default_rng(0)


def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def t(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def test_softmax_and_sigmoid_losses():
    logits, labels = chance.normal(size=(6, 4)), chance.integers(0, 4, 6)
    expected = -log_softmax(logits)[np.arange(6), labels]
    np.testing.assert_allclose(Classify(4).loss(t(logits), t(labels, torch.long)).numpy(), expected, rtol=1e-5)
    one_hot = np.eye(4)[labels]
    summed = -(one_hot * np.log(sigmoid(logits)) + (1 - one_hot) * np.log(1 - sigmoid(logits))).sum(1)
    got = Classify(4, loss="sigmoid").loss(t(logits), t(labels, torch.long))
    np.testing.assert_allclose(got.numpy(), summed, rtol=1e-5)


def test_mixed_targets_are_the_mixture_of_losses():
    logits = t(chance.normal(size=(1, 3)))
    for loss in ("softmax", "sigmoid"):
        task = Classify(3, loss=loss)
        parts = [float(task.loss(logits, torch.tensor([k]))) for k in (0, 2)]
        mixed = float(task.loss(logits, torch.tensor([[0.3, 0.0, 0.7]])))
        assert mixed == pytest.approx(0.3 * parts[0] + 0.7 * parts[1], rel=1e-5)


def test_class_weights_multiply_each_image_and_mix_with_the_labels():
    logits, weights = t(chance.normal(size=(2, 3))), np.array([1.0, 4.0, 0.5])
    plain, weighed = Classify(3), Classify(3, weights=weights)
    labels = torch.tensor([1, 2])
    assert torch.allclose(weighed.loss(logits, labels), plain.loss(logits, labels) * t([4.0, 0.5]))
    soft = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert torch.allclose(weighed.loss(logits, soft), plain.loss(logits, soft) * t([2.5, 0.5]))


def test_losses_are_float32_whatever_comes_in():
    half = torch.randn(2, 3, dtype=torch.bfloat16)
    assert Classify(3).loss(half, torch.tensor([0, 1])).dtype == torch.float32
    assert MultiLabel(3).loss(half, torch.ones(2, 3)).dtype == torch.float32


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_meters_of_parts_add_up(sizes):
    total = sum(sizes)
    logits, labels = torch.randn(total, 7), torch.randint(0, 7, (total,))
    targets = torch.randn(total, 7)
    for task, truth in ((Classify(7), labels), (Regress(np.random.default_rng(1).normal(size=(9, 7)), tuple("abcdefg")), targets),
                        (MultiLabel(7), (targets > 0).float())):  # fmt: skip
        whole, first = task.meter(), None
        whole.update(logits, truth)
        for part, answer in zip(logits.split(sizes), truth.split(sizes), strict=True):
            meter = task.meter()
            meter.update(part, answer)
            if first is None:
                first = meter
            else:
                first.add(meter.state())
        assert first.metrics() == pytest.approx(whole.metrics(), rel=1e-5, abs=1e-6)


def test_class_metrics():
    logits = t(np.eye(10)[[0, 0, 1, 2, 2, 2]] + 0.01 * np.arange(10))
    meter = Classify(10).meter()
    meter.update(logits, torch.tensor([0, 0, 0, 2, 2, 1]))
    found = meter.metrics()
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert found["balanced_accuracy"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert found["predicted_classes"] == 3
    assert found["images"] == 6
    # after its best class every row ranks 9, 8, 7, 6 highest, so only the four right ones are among the first five
    assert found["top5_accuracy"] == pytest.approx(4 / 6)


def test_average_precision_by_hand_and_by_brute_force():
    assert average_precision(np.array([0.9, 0.8, 0.7]), np.array([True, False, True])) == pytest.approx((1 + 2 / 3) / 2)
    scores, truth = chance.integers(0, 5, 40) / 5, chance.random(40) < 0.4
    levels = sorted(set(scores), reverse=True)
    recall_before, total = 0.0, 0.0
    for level in levels:
        yes = scores >= level
        recall, precision = (truth & yes).sum() / truth.sum(), (truth & yes).sum() / yes.sum()
        total += (recall - recall_before) * precision
        recall_before = recall
    assert average_precision(scores, truth) == pytest.approx(total)


def test_the_best_threshold_is_the_best_of_all():
    scores, truth = chance.random(50), chance.random(50) < 0.3

    def f1(level):
        yes = scores >= level
        return 2 * (yes & truth).sum() / max(yes.sum() + truth.sum(), 1)

    assert f1(best_threshold(scores, truth)) == pytest.approx(max(f1(level) for level in scores))
    assert best_threshold(scores, np.zeros(50, bool)) == 0.5


def test_regression_is_standardised_and_given_back():
    targets = chance.normal([10.0, -3.0], [100.0, 0.01], size=(500, 2))
    task = Regress(targets, ("mass", "angle"))
    standard = (targets - targets.mean(0)) / targets.std(0)
    perfect = t(standard)
    assert float(task.loss(perfect, t(targets)).max()) < 1e-6
    np.testing.assert_allclose(task.values(perfect).numpy(), targets, rtol=1e-4, atol=1e-3)
    meter = task.meter()
    meter.update(torch.zeros(500, 2), t(targets))
    found = meter.metrics()
    assert found["r2"] == pytest.approx(0, abs=1e-4)
    assert found["mae"] == pytest.approx(np.abs(targets - targets.mean(0)).mean(), rel=1e-4)


def test_regression_refuses_targets_that_cannot_be_learned():
    with pytest.raises(VitrailError, match="'b' is the same for every"):
        Regress(np.array([[1.0, 2.0], [3.0, 2.0]]), ("a", "b"))
    with pytest.raises(VitrailError, match="'a' is the same for every"):
        Regress(np.full((1000, 1), 0.1), ("a",))  # numpy's deviation of these is 1.4e-17
    with pytest.raises(VitrailError, match="training image 1 are"):
        Regress(np.array([[1.0], [np.nan]]), ("a",))


class Fixed(nn.Module):
    """A teacher that remembers what it saw."""

    def __init__(self, logits):
        super().__init__()
        self.logits = t(logits)

    def forward(self, images):
        self.seen = images
        return self.logits[: len(images)]


def distill(teacher, **changes):
    ours, theirs = Preprocess(size=(4, 4)), Preprocess(size=(8, 8), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    abc = ("a", "b", "c")
    settings = {"classes": abc, "teacher_classes": abc, "preprocess": ours, "teacher_preprocess": theirs}
    return Distill(Classify(3), teacher, **{**settings, **changes})


def test_hard_and_soft_distillation_against_their_formulas():
    logits, teacher, labels = chance.normal(size=(5, 3)), 3 * chance.normal(size=(5, 3)), torch.tensor([0, 1, 2, 0, 1])
    images, label_loss = torch.zeros(5, 3, 4, 4), -log_softmax(logits)[np.arange(5), labels.numpy()]
    hard = distill(Fixed(teacher), mode="hard", weight=0.3).objective(lambda x: t(logits), images, labels)
    distilled = -log_softmax(logits)[np.arange(5), teacher.argmax(1)]
    np.testing.assert_allclose(hard.numpy(), 0.7 * label_loss + 0.3 * distilled, rtol=1e-5)
    soft = distill(Fixed(teacher), mode="soft", weight=0.3, temperature=2.0).objective(lambda x: t(logits), images, labels)
    p, q = log_softmax(teacher / 2), log_softmax(logits / 2)
    divergence = (np.exp(p) * (p - q)).sum(1) * 4
    np.testing.assert_allclose(soft.numpy(), 0.7 * label_loss + 0.3 * divergence, rtol=1e-4)


def test_a_teachers_own_preprocessing_copies_nothing_from_the_host(monkeypatch):
    """A CUDA graph cannot hold such a copy, and the step would run uncaptured."""
    task = distill(Fixed(chance.normal(size=(2, 3)))).to("cpu")
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a copy from the host"))
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: pytest.fail("a copy from the host"))
    task.objective(lambda x: torch.zeros(2, 3), torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64))


def test_each_head_learns_its_own_part():
    one, two = t(chance.normal(size=(2, 3))), t(chance.normal(size=(2, 3)))
    task = distill(Fixed(chance.normal(size=(2, 3))), weight=0.5, two_heads=True)
    labels = torch.tensor([0, 2])
    calls = []
    got = task.objective(lambda x, heads=1: calls.append(heads) or (one, two), torch.zeros(2, 3, 4, 4), labels)
    expected = 0.5 * Classify(3).loss(one, labels) + 0.5 * task.distillation_loss(two, task.teacher.logits)
    assert calls == [2]
    assert torch.allclose(got, expected)


def test_the_teacher_sees_its_own_preprocessing():
    teacher = Fixed(np.zeros((1, 3)))
    grey = torch.tensor([0.2, 0.5, 0.9]).reshape(1, 3, 1, 1).expand(1, 3, 4, 4)  # on the scale from 0 to 1
    task = distill(teacher)
    task.objective(lambda x: torch.zeros(1, 3), (grey - 0.5) / 0.5, torch.tensor([0]))
    assert teacher.seen.shape == (1, 3, 8, 8)
    expected = (torch.tensor([0.2, 0.5, 0.9]) - torch.tensor([0.4, 0.5, 0.6])) / torch.tensor([0.2, 0.25, 0.3])
    assert torch.allclose(teacher.seen[0, :, 0, 0], expected, atol=1e-6)
    assert not task.teacher.training


def test_class_maps_must_agree():
    with pytest.raises(VitrailError, match="another order: output 1 is 'b' here and 'c'"):
        distill(Fixed(np.zeros((1, 3))), teacher_classes=("a", "c", "b"))
    with pytest.raises(VitrailError, match="does not know 'b'; only the teacher knows 'd'"):
        distill(Fixed(np.zeros((1, 3))), teacher_classes=("a", "c", "d"))
