"""A recorded step is the same step. Only a GPU can record one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitrail.train.graphs import Recording

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def losses(recorded: bool, steps: int = 10, spoil: Callable[[Tensor], object] | None = None) -> list[float]:
    """Of a small network with dropout, seeded before every step as the loop does it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(images: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(images), targets)
        if spoil is not None:
            spoil(loss)
        loss.backward()
        return loss.detach()

    step = Recording(backward, list(model.parameters())) if recorded else backward
    found = []
    for number in range(steps):
        torch.cuda.manual_seed(number)
        size = 8 if number != 7 else 5  # one smaller batch goes the ordinary way
        images = torch.randn(size, 16, generator=torch.Generator().manual_seed(number)).cuda()
        found.append(float(step(images, torch.arange(size, device="cuda") % 4)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if isinstance(step, Recording):
        assert bool(step.failure) == (spoil is not None)
    return found


def test_a_recorded_step_learns_the_same() -> None:
    assert losses(True) == losses(False)


def test_what_cannot_be_recorded_runs_all_the_same() -> None:
    """Here the step waits for the device, which no recording bears."""
    assert losses(True, spoil=lambda loss: loss.item()) == losses(False)
