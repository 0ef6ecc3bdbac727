from __future__ import annotations

import numpy as np
import torch
from torch import nn

from vitrail.train.averaging import Average


def test_the_mean_follows_its_formula_and_can_be_applied_for_a_while():
    model = nn.Linear(2, 1, bias=False)
    average = Average(model, 0.9)
    expected = model.weight.detach().double().numpy().copy()
    for step in range(5):
        with torch.no_grad():
            model.weight.add_(step + 1.0)
        average.update(step)
        expected = 0.9 * expected + 0.1 * model.weight.detach().double().numpy()
    now = model.weight.detach().clone()
    np.testing.assert_allclose(average.tensors()["weight"].numpy(), expected, rtol=1e-6)
    with average.applied():
        assert torch.equal(model.weight, average.tensors()["weight"])
    assert torch.equal(model.weight, now)


def test_the_warm_up_forgets_the_beginning():
    model = nn.Linear(1, 1, bias=False)
    slow, quick = Average(model, 0.9999), Average(model, 0.9999, warmup=True)
    with torch.no_grad():
        model.weight.fill_(5.0)
    for step in range(20):
        slow.update(step)
        quick.update(step)
    assert abs(float(quick.tensors()["weight"]) - 5) < 0.1 < abs(float(slow.tensors()["weight"]) - 5)


def test_frozen_weights_are_not_averaged():
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    assert set(Average(model, 0.9).tensors()) == {"bias"}
