"""A recorded step is the same step. Only a GPU can record one; how gradients are added up is tested anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.train.graphs import Recording

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def losses(recorded: bool, steps: int = 10, parts: int = 1, spoil: Callable[[Tensor], object] | None = None) -> list[float]:
    """Of a small network with dropout, seeded before every micro-batch as the loop does it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(images: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(images), targets) / parts
        if spoil is not None:
            spoil(loss)
        loss.backward()
        return loss.detach()

    step = Recording(backward, list(model.parameters())) if recorded else backward
    found = []
    for number in range(steps):
        for part in range(parts):
            torch.cuda.manual_seed(number * parts + part)
            size = 8 if number != 7 or part != parts - 1 else 5  # one smaller batch goes the ordinary way
            images = torch.randn(size, 16, generator=torch.Generator().manual_seed(number * parts + part)).cuda()
            found.append(float(step(images, torch.arange(size, device="cuda") % 4)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if isinstance(step, Recording):
        assert bool(step.failure) == (spoil is not None)
    return found


@on_a_gpu
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_recorded_step_learns_the_same(parts: int) -> None:
    assert losses(True, parts=parts) == losses(False, parts=parts)


@on_a_gpu
def test_what_cannot_be_recorded_runs_all_the_same() -> None:
    """Here the step waits for the device, which no recording bears."""
    assert losses(True, spoil=lambda loss: loss.item()) == losses(False)


class Replayed(Recording):
    """Where there is no GPU: a replay computes what was recorded again, and writes its gradients over those of the last replay."""

    def _record(self, images: Tensor, targets: Tensor) -> None:
        before = [one.grad for one in self._parameters]
        self._images, self._targets = images.clone(), targets.clone()
        self._run()
        self._learning = [(one, one.grad) for one in self._parameters if one.grad is not None]
        self._graph = self  # type: ignore[assignment]
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient

    def _run(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._loss = self._backward(self._images, self._targets)

    def replay(self) -> None:
        there = [one.grad for one in self._parameters]
        self._run()
        for parameter, place in self._learning:
            assert parameter.grad is not None
            place.copy_(parameter.grad)
        for parameter, gradient in zip(self._parameters, there, strict=True):
            parameter.grad = gradient


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_gradients_of_micro_batches_add_up(parts: int) -> None:
    """With one parameter that is never used, and now and then a micro-batch of another size, first, between or last."""

    def gradients(kind: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        model, unused = nn.Linear(6, 3), nn.Parameter(torch.ones(2))
        parameters = [*model.parameters(), unused]

        def backward(images: Tensor, targets: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            return loss.detach()

        step, found = kind(backward, parameters) if kind else backward, []
        for number in range(12):
            shown = []
            for part in range(parts):
                size = 2 if number >= 6 and (number + part) % 4 == 0 else 3
                shown.append(step(torch.randn(size, 6), torch.arange(size)))
            found += [None if one.grad is None else one.grad.clone() for one in parameters] + [torch.stack(shown)]
            for parameter in parameters:
                parameter.grad = None
        if kind:
            assert step._graph is not None
        return found

    for one, two in zip(gradients(Replayed), gradients(None), strict=True):
        assert (one is None) == (two is None) and (one is None or two is None or torch.equal(one, two))
