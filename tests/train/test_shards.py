"""FSDP2 on one rank, and with a fake process group: updates, norms and evaluations of shards."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.train.small import small
from tests.train.test_capture import StandIn
from vitrail.errors import VitrailError
from vitrail.models import create_model
from vitrail.models.vit import ViT
from vitrail.train import CapturedStep, recovery
from vitrail.train.averaging import Average
from vitrail.train.config import OptimSpec
from vitrail.train.loop import Loop
from vitrail.train.optimizers import Optimizer
from vitrail.train.parallel import Runner, World, blocks_of, fits_gathered
from vitrail.train.prepare import prepare
from vitrail.train.run import RunFolder
from vitrail.train.shards import whole

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def tiny() -> ViT:
    model = create_model("ViT-Ti/4", image_size=8, channels=1, width=32, depth=2, heads=1, mlp=48, outputs=4, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model


def images() -> Tensor:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def sharded(model: ViT, **settings: Any) -> Runner:
    return Runner(model, World(CPU, mode="fsdp"), **settings)


@pytest.mark.parametrize("keep_gathered", [False, True])
@pytest.mark.parametrize("spec", [OptimSpec(name="sgd", lr=0.1, clip=0.5), OptimSpec(name="adamw", lr=1e-2, clip=0.5)])
def test_shards_are_updated_as_whole_parameters_are(spec: OptimSpec, keep_gathered: bool, group: None) -> None:
    alone, ours = tiny(), tiny()
    runner = sharded(ours, keep_gathered=keep_gathered)
    optimizers = Optimizer(alone, spec), Optimizer(ours, spec)
    averages = Average(alone, 0.5), Average(ours, 0.5)
    for number in range(4):
        for run, optimizer, average in zip((alone, runner), optimizers, averages, strict=True):
            run(images()).square().sum().backward()
            optimizer.step(skip=torch.tensor(float(number == 2)), norm=optimizer.grad_norm())
            optimizer.zero_grad()
            average.update(number)
    for (name, one), two in zip(alone.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, whole(two)), name
        assert two.grad is None
    for first, second in ((one.tensors(), two.tensors()) for one, two in (optimizers, averages)):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.equal(value, whole(second[name])), name
            assert value.ndim == 0 or hasattr(second[name], "device_mesh"), name


def test_saved_state_can_be_written_into(group: None) -> None:
    model = tiny()
    sharded(model)
    kept = [Optimizer(model, OptimSpec(name="adamw")), Average(model, 0.5)]
    for one in kept:
        for value in one.tensors().values():
            value.detach().fill_(3.0)
        assert all(bool((whole(value) == 3.0).all()) for value in one.tensors().values())


def test_a_shard_that_was_moved_is_still_updated(group: None) -> None:
    model = tiny()
    runner, optimizer = sharded(model), Optimizer(model, OptimSpec(name="sgd", lr=1.0))
    weight: Any = model.head.weight
    before = weight.to_local().clone()
    runner(images()).square().sum().backward()
    weight._local_tensor = before.clone()
    optimizer.step()
    assert not torch.equal(weight.to_local(), before)


def test_copies_do_not_count_in_the_norm(four_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of two shards each: the norm is summed over the two ranks that hold different shards."""
    model = tiny()
    Runner(model, World(CPU, 0, 4, 2, "hybrid"))
    optimizer = Optimizer(model, OptimSpec())
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    summed: list[list[int]] = []

    def all_reduce(value: Tensor, group: Any) -> None:
        summed.append(dist.get_process_group_ranks(group))
        value.mul_(2)  # as if the other rank had the same

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    squares = sum(one.to_local().numel() for one in model.parameters())  # type: ignore[attr-defined]
    torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(2.0 * squares).sqrt())
    assert summed == [[0, 1]]


@pytest.mark.parametrize("keep_gathered", [False, True])
def test_gathered_weights_are_not_used_after_the_shards_changed(keep_gathered: bool, group: None) -> None:
    model, plain = tiny(), tiny()
    runner = sharded(model, keep_gathered=keep_gathered)
    parameters = list(model.parameters())
    with torch.no_grad():
        runner(images())  # no backward pass follows, which would free them
        for one in (*parameters, *plain.parameters()):
            one.mul_(0.5)
        runner.reshard()
        torch.testing.assert_close(runner(images()), plain(images()))


def captured(runner: Runner, new_graph: Any = None, **settings: Any) -> CapturedStep:
    parameters = list(runner.model.parameters())

    def step(images: Tensor) -> Tensor:
        loss = runner(images).square().sum()
        loss.backward()
        return loss.detach()

    make = new_graph or (lambda: StandIn(parameters))
    return CapturedStep(step, parameters, captures_shards=True, new_graph=make, **settings)


@pytest.mark.parametrize("parts", [1, 2])
def test_replays_write_and_add_up_gradients_of_shards(parts: int, group: None) -> None:
    alone, ours = tiny(), tiny()
    made = captured(sharded(ours, keep_gathered=True))
    for number in range(6):
        for part in range(parts):
            given = images() * (1 + number + part)
            alone(given).square().sum().backward()
            made(given)
        for (name, one), two in zip(alone.named_parameters(), ours.named_parameters(), strict=True):
            assert one.grad is not None and two[1].grad is not None
            assert torch.equal(one.grad, whole(two[1].grad)), name
        alone.zero_grad()
        ours.zero_grad()
    assert made.captured


class Broken:
    """A graph whose capture fails in the first block, in its forward or backward pass."""

    def __init__(self, model: ViT, where: str) -> None:
        self.model, self.where = model, where

    def capture(self, run: Any) -> Any:
        block = self.model.blocks[0]

        def fail(*_: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        if self.where == "forward":
            handle: Any = block.register_forward_hook(fail)
        else:
            handle = block.register_full_backward_hook(fail)
        try:
            return run()
        finally:
            handle.remove()

    def replay(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("keep_gathered", [False, True])
@pytest.mark.parametrize("has_reset", [False, True])
def test_training_continues_after_a_capture_that_failed(
    where: str, keep_gathered: bool, has_reset: bool, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 is then in the middle of a step, and would take the next forward pass for a part of it."""
    if not has_reset:  # as in torch 2.11
        monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state", raising=False)
    alone, ours = tiny(), tiny()
    runner, reasons = sharded(ours, keep_gathered=keep_gathered), list[str]()

    def failed(reason: str) -> None:
        reasons.append(reason)
        runner.renew()

    made = captured(runner, lambda: Broken(ours, where), on_failure=failed)
    for number in range(6):
        given = images() * (1 + number)
        alone(given).square().sum().backward()
        made(given)
        for (name, one), two in zip(alone.named_parameters(), ours.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            assert torch.equal(one.grad, whole(two.grad)), (number, name)
        alone.zero_grad()
        ours.zero_grad()
    assert reasons == ["RuntimeError: operation not permitted when stream is capturing"] and not made.captured


def test_a_loop_of_ones_own_is_not_captured_over_shards(group: None) -> None:
    model = tiny()
    runner = sharded(model)

    def step(images: Tensor) -> Tensor:
        loss = runner(images).square().sum()
        loss.backward()
        return loss.detach()

    made = CapturedStep(step, model.parameters(), new_graph=lambda: StandIn(list(model.parameters())))
    for _ in range(6):
        made(images())
    assert not made.captured and not made.failure


@pytest.mark.parametrize("micro_batch", [8, 16])
def test_only_a_whole_step_is_replayed(micro_batch: int, tmp_path: Path, group: None) -> None:
    """A captured step sums gradients over ranks, which must happen once per step, with its last micro-batch."""
    recipe = small(parallel="fsdp", batch=16, micro_batch=micro_batch, model__dropout=0.0, model__stochastic_depth=0.0)
    loop = Loop(recipe, RunFolder(tmp_path), World(CPU, mode="fsdp"), prepare(recipe, on_meta=True), ())
    loop.go_to(0)
    step, sizes = loop.step, list[int]()

    def replay(images: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(images))
        return step._backward(images, targets, recipe.batch)

    step._captured = replay  # type: ignore[assignment]
    step.take(loop.micro_batches(), 0)
    step._captured = None
    loop.close()
    assert sizes == ([16] if micro_batch == 16 else [])


def test_blocks_stay_gathered_where_there_is_memory() -> None:
    model = tiny()
    values = sum(one.numel() for one in model.blocks.parameters())
    assert fits_gathered(model, torch.bfloat16, 20 * values) and not fits_gathered(model, torch.bfloat16, 20 * values - 11)
    assert not fits_gathered(model, None, 20 * values)


def test_a_trial_leaves_no_gradient(tmp_path: Path, group: None) -> None:
    """FSDP2 keeps gradients that were not summed over ranks, and would add them to the first step's."""
    recipe = small(parallel="fsdp", model__dropout=0.0, model__stochastic_depth=0.0)
    norms = []
    for name, tries in (("without", False), ("with", True)):
        loop = Loop(recipe, RunFolder(tmp_path / name), World(CPU, mode="fsdp"), prepare(recipe, on_meta=True), ())
        loop.go_to(0)
        assert not tries or recovery._fits(loop)
        loop.go_to(0)
        loop.step.take(loop.micro_batches(), 0)
        norms.append(loop.step.read().grad_norm)
        loop.close()
    assert norms[0] == norms[1] > 0


class Ranks(World):
    """Two ranks of FSDP2, of which the other one answers `other`."""

    other: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [value, type(self).other]


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_ranks_agree_whether_a_micro_batch_fits(here: bool, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ran out of memory alone left the others waiting for its shards."""
    monkeypatch.setattr(Ranks, "other", there)
    loop: Any = types.SimpleNamespace(world=Ranks(CPU, ranks=2, mode="fsdp"), micro_batch=8)
    if here == there:
        assert recovery._any_failed(loop, here) == here
        return
    with pytest.raises(VitrailError, match=f"Rank {int(there)} ran out of memory at micro-batch 8.*--micro-batch 4"):
        recovery._any_failed(loop, here)


def test_ranks_run_out_of_memory_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: limits.append(fraction))
    monkeypatch.setattr(Ranks, "other", 50)
    with recovery._equal_memory(Ranks(torch.device("cuda", 0), ranks=2, mode="fsdp")):
        assert limits == [0.5]
    assert limits == [0.5, 1.0]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("when", ["trial", "step"])
def test_training_continues_after_memory_ran_out(where: str, when: str, tmp_path: Path, group: None) -> None:
    """FSDP2 is then in the middle of a step. It computed no gradient any more, and the loss stayed as it was."""
    recipe = small(parallel="fsdp", batch=16, micro_batch="auto", model__dropout=0.0, model__stochastic_depth=0.0)
    found = []
    for name, fails in (("without", False), ("with", True)):
        loop = Loop(recipe, RunFolder(tmp_path / name), World(CPU, mode="fsdp"), prepare(recipe, on_meta=True), ())
        loop.go_to(0)
        loop.set_micro_batch(8)
        loop.go_to(0)
        if fails:
            block, calls = blocks_of(loop.prepared.trained)[0], list[int]()

            def run_out(*_: Any, calls: list[int] = calls) -> None:
                calls.append(1)
                if len(calls) == (1 if when == "trial" else 2):  # in a step, after a gradient was accumulated
                    raise torch.OutOfMemoryError("CUDA out of memory")

            register: Any = block.register_forward_hook if where == "forward" else block.register_full_backward_hook
            handle = register(run_out)
            if when == "trial":
                assert not recovery._fits(loop)
                handle.remove()
                assert recovery._fits(loop)
                loop.go_to(0)
        for number in range(2):
            loop._take(number)
            reading = loop.step.read()
            found.append((reading.loss, reading.grad_norm))
        assert loop.micro_batch == (4 if fails and when == "step" else 8)
        loop.close()
    torch.testing.assert_close(torch.tensor(found[:2]), torch.tensor(found[2:]), rtol=1e-4, atol=1e-6)
    assert found[0][1] > 0


def test_an_evaluation_of_the_mean_leaves_the_weights(tmp_path: Path, group: None) -> None:
    """The gathered mean would otherwise be what the next step starts from."""
    recipe = small(parallel="fsdp", ema=0.5, model__dropout=0.0, model__stochastic_depth=0.0, optim__lr=0.1)
    norms = []
    for name, evaluates in (("without", False), ("with", True)):
        loop = Loop(recipe, RunFolder(tmp_path / name), World(CPU, mode="fsdp"), prepare(recipe, on_meta=True), ())
        loop.go_to(0)
        for number in range(3):
            loop.step.take(loop.micro_batches(), number)
        if evaluates:
            (tmp_path / name).mkdir()
            loop._validate()
        loop.step.take(loop.micro_batches(), 3)
        norms.append(loop.step.read().grad_norm)
        loop.close()
    assert norms[0] == norms[1]
