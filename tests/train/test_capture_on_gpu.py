"""Captured steps with CUDA's graphs, alone and with DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.test_capture import on_a_gpu
from vitrail.train import CapturedStep, capture


def losses(captured: bool, steps: int = 10, parts: int = 1, uncapturable: Callable[[Tensor], object] | None = None) -> list[float]:
    """Of a small network with dropout, seeded before every micro-batch as the loop does it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(images: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(images), targets) / parts
        if uncapturable is not None:
            uncapturable(loss)
        loss.backward()
        return loss.detach()

    reasons: list[str] = []
    step: Any = CapturedStep(backward, model.parameters(), on_failure=reasons.append) if captured else backward
    found = []
    for number in range(steps):
        for part in range(parts):
            torch.cuda.manual_seed(number * parts + part)
            size = 8 if number != 7 or part != parts - 1 else 5  # one smaller batch runs normally
            images = torch.randn(size, 16, generator=torch.Generator().manual_seed(number * parts + part)).cuda()
            found.append(float(step(images, torch.arange(size, device="cuda") % 4)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if captured:
        assert bool(reasons) == (uncapturable is not None) and step.captured == (uncapturable is None)
    return found


@on_a_gpu
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_captured_step_learns_the_same(parts: int) -> None:
    assert losses(True, parts=parts) == losses(False, parts=parts)


@on_a_gpu
def test_a_step_that_cannot_be_captured_runs_normally() -> None:
    """Here the step waits for the device, which no capture allows."""
    assert losses(True, uncapturable=lambda loss: loss.item()) == losses(False)


@on_a_gpu
def test_a_failed_capture_restores_the_gpus_random_numbers() -> None:
    def draws(captured: bool) -> list[float]:
        model = nn.Linear(4, 1).cuda()

        def step(images: Tensor) -> Tensor:
            loss = nn.functional.dropout(model(images)).sum()
            loss.backward()
            loss.item()
            return loss.detach()

        made: Any = CapturedStep(step, model.parameters(), on_failure=lambda reason: None) if captured else step
        torch.manual_seed(1)
        for _ in range(6):
            made(torch.ones(8, 4, device="cuda"))
        return torch.rand(3, device="cuda").tolist()

    torch.manual_seed(0)
    assert draws(True) == draws(False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_another_gpu_than_the_current_one_is_captured_there() -> None:
    model = nn.Linear(4, 1).to("cuda:1")

    def step(images: Tensor) -> Tensor:
        loss = model(images).square().sum()
        loss.backward()
        return loss.detach()

    made = capture(step, model.parameters())
    for number in range(6):
        images = torch.full((2, 4), float(number), device="cuda:1")
        model.zero_grad()
        torch.testing.assert_close(made(images), model(images).square().sum().detach())
    assert made.captured and torch.cuda.current_device() == 0


@pytest.fixture
def nccl() -> Iterator[torch.device]:
    import torch.distributed as dist

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


@on_a_gpu
def test_ddp_on_nccl_is_captured_with_its_all_reduces(nccl: torch.device) -> None:
    """World size 1: the collectives run, and the result is that of the model alone."""
    from vitrail.train.captured_step import DDP_WARMUP
    from vitrail.train.parallel import Runner, World

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(nccl)
    copy = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(nccl)
    copy.load_state_dict(alone.state_dict())
    runner = Runner(copy, World(nccl, mode="ddp"))
    reasons: list[str] = []

    def step(images: Tensor) -> Tensor:
        loss = runner(images).square().mean()
        loss.backward()
        return loss.detach()

    made = CapturedStep(step, copy.parameters(), warmup=DDP_WARMUP, stream=runner.stream, on_failure=reasons.append)
    for _ in range(16):
        images = torch.randn(8, 16, device=nccl)
        for model in (alone, copy):
            model.zero_grad(set_to_none=True)
        alone(images).square().mean().backward()
        made(images)
        for one, two in zip(alone.parameters(), copy.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)
    assert made.captured and not reasons
    made.reset()


@on_a_gpu
def test_fsdp_is_captured_and_used_in_between(nccl: torch.device) -> None:
    """The same under FSDP2, with weights that change, an evaluation and pinned memory of others between the steps."""
    from vitrail.models import create_model
    from vitrail.train.parallel import Runner, World
    from vitrail.train.shards import whole

    alone, ours = (create_model("ViT-Ti/4", image_size=8, depth=3, seed=0).to(nccl) for _ in range(2))
    runner = Runner(ours, World(nccl, mode="fsdp"))
    reasons: list[str] = []

    def step(images: Tensor) -> Tensor:
        loss = runner(images).square().mean()
        loss.backward()
        runner.join_streams()
        return loss.detach()

    parameters = list(ours.parameters())
    made = CapturedStep(step, parameters, on_failure=reasons.append, captures_shards=True)
    for _ in range(9):
        images = torch.randn(8, 3, 8, 8, device=nccl)
        runner.reshard()
        alone(images).square().mean().backward()
        made(images)
        for one, two in zip(alone.parameters(), parameters, strict=True):
            torch.testing.assert_close(one.grad, whole(two.grad))
        with torch.no_grad():
            for one, two in zip(alone.parameters(), parameters, strict=True):
                one.mul_(0.9)
                two.mul_(0.9)
                one.grad = two.grad = None
            runner.reshard()
            torch.testing.assert_close(runner(images), alone(images))
        for size in range(4, 14):
            torch.full((2**size,), -1, pin_memory=True)
    assert made.captured and not reasons
