"""A captured step computes what the step does. Only a GPU can capture one; everything around the graph is tested anywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vitrail.train
from vitrail.errors import VitrailError
from vitrail.train import CapturedStep, capture
from vitrail.train.shards import local

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


class StandIn:
    """A graph without a GPU: a replay runs the step again and writes results and gradients where the capture put them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.replays = 0

    def capture(self, run: Callable[[], Any]) -> Any:
        self.run, self.results = run, run()
        self.gradients = [one.grad for one in self.parameters]
        self.memory = self._memory()
        self.results = self.results if isinstance(self.results, tuple) else (self.results,)
        return self.results if len(self.results) > 1 else self.results[0]

    def replay(self) -> None:
        self.replays += 1
        assert self._memory() == self.memory, "a graph would still read what was there"
        there = [one.grad for one in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        results = self.run()
        for old, new in zip(self.results, results if isinstance(results, tuple) else (results,), strict=True):
            old.data.copy_(new)
        for parameter, place, before in zip(self.parameters, self.gradients, there, strict=True):
            assert (parameter.grad is None) == (place is None)
            if place is not None and parameter.grad is not None:
                place.copy_(parameter.grad)
            parameter.grad = before

    def _memory(self) -> list[int]:
        return [local(one).data_ptr() for one in self.parameters]


def stand_in(step: Any, parameters: list[nn.Parameter], **keywords: Any) -> CapturedStep:
    return CapturedStep(step, parameters, new_graph=lambda: StandIn(parameters), **keywords)


def network() -> tuple[nn.Linear, Callable[[Tensor, Tensor], Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)

    def step(images: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        return loss

    return model, step


def batch(seed: int, size: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed)), torch.arange(size) % 3


def compare(change: Callable[[int, nn.Linear], object], steps: int = 14) -> CapturedStep:
    """Take steps with and without capture, with `change(number, model)` before each; gradients and losses must be equal."""

    def run(captured: bool) -> tuple[list[Tensor], Any]:
        model, step = network()
        made = stand_in(step, list(model.parameters())) if captured else step
        found = []
        for number in range(steps):
            change(number, model)
            found.append(made(*batch(number)).detach().clone())
            found += [torch.zeros(1) if one.grad is None else one.grad.clone() for one in model.parameters()]
        return found, made

    (ours, made), (theirs, _) = run(True), run(False)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    assert isinstance(made, CapturedStep)
    return made


def test_capture_is_a_function_of_the_package_and_runs_the_step_where_there_is_no_gpu() -> None:
    assert callable(vitrail.train.capture)
    model, step = network()
    made = capture(step, model.parameters())
    for number in range(6):
        assert not made(*batch(number)).requires_grad
    assert not made.captured and not made.failure
    with pytest.raises(VitrailError, match=r"model.parameters\(\)"):
        capture(step, [])


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_gradients_of_micro_batches_add_up(parts: int) -> None:
    """With one parameter that is never used, and now and then a micro-batch of another size, first, between or last."""

    def gradients(captured: bool) -> list[Tensor | None]:
        model, step = network()
        parameters = [*model.parameters(), nn.Parameter(torch.ones(2))]
        made, found = stand_in(step, parameters) if captured else step, list[Tensor | None]()
        for number in range(12):
            for part in range(parts):
                size = 2 if number >= 6 and (number + part) % 4 == 0 else 3
                found.append(made(*batch(number * parts + part, size)).detach())
            found += [None if one.grad is None else one.grad.clone() for one in parameters]
            for parameter in parameters:
                parameter.grad = None
        if isinstance(made, CapturedStep):
            assert made.captured
        return found

    for one, two in zip(gradients(True), gradients(False), strict=True):
        assert (one is None) == (two is None) and (one is None or two is None or torch.equal(one, two))


def zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize(
    "change",
    [
        lambda number, model: number % 3 or zero(model),
        lambda number, model: [one.grad.zero_() for one in model.parameters() if one.grad is not None],
        # One gradient is dropped, the other stays: each is treated by itself.
        lambda number, model: setattr(model.bias, "grad", None),
        # Replaced by a tensor of one's own, as unscaling or clipping out of place does.
        lambda number, model: model.weight.grad is not None and setattr(model.weight, "grad", model.weight.grad * 0.5),
        # Another name for the very tensor that a replay writes into.
        lambda number, model: model.weight.grad is not None and setattr(model.weight, "grad", model.weight.grad.detach()),
    ],
)
def test_gradients_may_be_dropped_zeroed_and_replaced(change: Callable[[int, nn.Linear], object]) -> None:
    assert compare(change).captured


def test_frozen_and_moved_parameters_are_captured_again() -> None:
    def freeze(number: int, model: nn.Linear) -> None:
        zero(model)
        model.weight.requires_grad_(number < 6)

    def move(number: int, model: nn.Linear) -> None:
        zero(model)
        if number == 6:
            model.weight.data = model.weight.data * 2

    assert compare(freeze).captured and compare(move).captured


def test_autocast_is_part_of_what_was_captured() -> None:
    model, step = network()
    made = stand_in(step, list(model.parameters()))
    for number in range(5):
        full = made(*batch(number))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made.captured and not torch.equal(made(*batch(4)), full) and not made.captured


def test_inputs_of_another_type_and_calls_without_gradients_are_not_replayed() -> None:
    model, _ = network()

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        found = model(images.float())
        if torch.is_grad_enabled():
            found.sum().backward()
        return found, images / 3

    made = stand_in(step, list(model.parameters()))
    images = batch(0)[0] * 10
    for _ in range(5):
        made(images)
    assert made.captured
    double = images.double()
    assert all(torch.equal(one, two) for one, two in zip(made(double), step(double), strict=True))
    model.zero_grad()
    with torch.no_grad():
        made(images)
    assert model.weight.grad is None


class Recorded:
    """A graph without a GPU that holds operations and their memory: a replay runs the same ones on the same tensors."""

    def capture(self, run: Callable[[], Any]) -> Any:
        recorded = self.recorded = list[tuple[Any, Any, Any, Any]]()

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                found = func(*args, **(kwargs or {}))
                recorded.append((func, args, kwargs or {}, found))
                return found

        with Record():
            return run()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, place in self.recorded:
            for one, new in zip(tree_leaves(place), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(one, Tensor) and one.data_ptr() != new.data_ptr():
                    one.data.copy_(new)


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_autocast_around_several_calls_does_not_keep_old_weights(warmup: int) -> None:
    """Autocast casts a weight once and keeps that: a graph must neither read what was cast before it, nor be read itself."""

    def run(captured: bool) -> list[Tensor]:
        model, step = network()
        made: Any = CapturedStep(step, model.parameters(), new_graph=Recorded, warmup=warmup) if captured else step
        optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), list[Tensor]()
        for number in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for part in range(5):
                    found.append(made(*batch(5 * number + part, size=2 if part == 4 else 3)).detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        assert not captured or made.captured
        return found

    assert all(torch.equal(one, two) for one, two in zip(run(True), run(False), strict=True))


def test_a_gradient_of_a_parameter_that_was_not_given_is_noticed() -> None:
    """A replay would not hand it over after the next `zero_grad`: a layer that was added would stay as it is, without a word."""
    model, step = network()
    made = CapturedStep(step, [model.weight], new_graph=Recorded)
    with pytest.warns(UserWarning, match=r"gradient of a parameter \[3\] that was not passed to `capture`"):
        for number in range(6):
            model.zero_grad()
            made(*batch(number))
            assert model.bias.grad is not None
    assert not made.captured


def test_another_shape_takes_over_when_it_stays() -> None:
    model, step = network()
    made = stand_in(step, list(model.parameters()))
    for number in range(5):
        made(*batch(number))
    first = made._captured
    for number in range(16):
        made(*batch(number, size=2))
        assert made._captured is first
    made(*batch(0, size=2))
    assert made._captured is not first and made.captured


def test_a_step_may_take_no_tensors() -> None:
    """It may read a buffer of its own, which the caller fills."""
    model, step = network()
    images, targets = batch(0)
    made = stand_in(lambda: step(images, targets), list(model.parameters()))
    for number in range(6):
        images.copy_(batch(number)[0])
        loss = made()
        assert torch.equal(loss, nn.functional.cross_entropy(model(images), targets).detach())
    assert made.captured


def test_results_are_tensors_in_any_structure_and_stay_when_the_next_call_writes_again() -> None:
    model, one = network()

    def step(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return one(images, targets), model(images)

    made = stand_in(step, list(model.parameters()))
    kept = [made(*batch(number)) for number in range(8)]
    assert all(torch.equal(kept[number][1], model(batch(number)[0])) for number in range(8))
    with pytest.raises(VitrailError, match="returned a value of type float"):
        stand_in(lambda images, targets: float(one(images, targets)), list(model.parameters()))(*batch(0))
    with pytest.raises(VitrailError, match=r"pass model.parameters\(\)"):
        capture(lambda x: x, nn.Linear(1, 1))  # type: ignore[arg-type]  # the model itself


class Broken:
    def capture(self, run: Callable[[], Any]) -> Any:
        try:
            torch.rand(3)
            run()
            raise RuntimeError("the step waits for the device")
        finally:
            raise ValueError("a broken capture ends with an error of its own")

    def replay(self) -> None:
        raise AssertionError


def test_a_failed_capture_leaves_gradients_and_random_numbers_alone_and_warns_once() -> None:
    def run(captured: bool) -> list[Tensor]:
        model, one = network()

        def step(images: Tensor, targets: Tensor) -> Tensor:
            return one(nn.functional.dropout(images), targets)

        made: Any = CapturedStep(step, model.parameters(), new_graph=Broken) if captured else step
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = [made(*batch(number)).detach() for number in range(8)]
        warned = "The step could not be captured as a CUDA graph (RuntimeError: the step waits for the device). It runs normally"
        assert [str(one.message).rpartition(",")[0] for one in caught] == [warned] * captured
        return [*losses, *(one.grad for one in model.parameters() if one.grad is not None)]

    assert all(torch.equal(one, two) for one, two in zip(run(True), run(False), strict=True))


def test_ranks_give_up_together() -> None:
    model, step = network()
    reasons: list[str] = []
    made = stand_in(step, list(model.parameters()), any_rank=lambda failed: True, on_failure=reasons.append)
    for number in range(6):
        made(*batch(number))
    assert reasons == ["it failed on another rank"] and not made.captured


def test_inputs_that_need_gradients_are_refused_with_the_reason() -> None:
    model, step = network()
    reasons: list[str] = []
    made = stand_in(step, list(model.parameters()), on_failure=reasons.append)
    images, targets = batch(0)
    images.requires_grad_()
    for _ in range(5):
        made(images, targets)
    assert len(reasons) == 1 and "input 0 requires a gradient" in reasons[0] and images.grad is not None


def test_inputs_get_their_gradients_from_a_captured_step_too() -> None:
    model, step = network()
    made = stand_in(step, list(model.parameters()))
    for number in range(6):
        made(*batch(number))
    assert made.captured
    images, targets = batch(6)
    made(images.requires_grad_(), targets)
    assert images.grad is not None
    made(*batch(7))
    assert made.captured


def test_parameters_given_twice_get_their_gradient_once() -> None:
    model, step = network()
    made = CapturedStep(step, [*model.parameters(), model.weight], new_graph=lambda: StandIn(list(model.parameters())))
    for number in range(6):
        made(*batch(number))
    found = model.weight.grad
    model.weight.grad = None
    for number in range(6):
        step(*batch(number))
    assert made.captured and found is not None and model.weight.grad is not None
    assert torch.allclose(found, model.weight.grad)
