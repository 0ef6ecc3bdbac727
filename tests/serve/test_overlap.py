"""Batches that are launched while the one before is computed, as on a GPU: on one where there is one, otherwise on a stand-in.

The stand-in has what matters of a stream: what is launched is computed later, one after the other, from the memory that it was
launched with.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data.types import Array
from vitrail.errors import VitrailError
from vitrail.serve import engine as engine_module
from vitrail.serve.engine import Engine, Image, Kind, Launched
from vitrail.serve.errors import ServiceError
from vitrail.serve.metrics import Metrics
from vitrail.serve.settings import ServeSettings
from vitrail.serve.worker import Job, ModelWorker, Work


class OnStream(Launched):
    def __init__(self, computed: Future[Launched]) -> None:
        self._computed = computed

    def rows(self) -> list[Array | ServiceError]:
        return self._computed.result(20).rows()


class Stream:
    """Computes one batch after the other, once it may. `computing`: the sizes of what was launched and is not computed."""

    def __init__(self) -> None:
        self.thread, self.may_compute = ThreadPoolExecutor(1), threading.Event()
        self.computing: list[int] = []
        self.most = 0

    def launch(self, engine: Any, kind: Kind, batch: Tensor) -> Launched:
        def compute() -> Launched:
            assert self.may_compute.wait(20)
            try:
                return Launched(engine_module._outputs(engine._model, kind, batch))
            finally:
                self.computing.pop(0)

        self.computing.append(len(batch))
        self.most = max(self.most, len(self.computing))
        return OnStream(self.thread.submit(compute))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    made, initialise = Stream(), Engine.__init__

    def overlapping(self: Engine, *arguments: Any) -> None:
        initialise(self, *arguments)
        self.overlaps = True

    def launch(self: Engine, kind: Kind, images: list[Image]) -> Launched:
        return made.launch(self, kind, self._input(images, len(images)))

    monkeypatch.setattr(Engine, "__init__", overlapping)
    monkeypatch.setattr(Engine, "launch", launch)
    yield made
    made.may_compute.set()
    made.thread.shutdown()


class Caller:
    """Sends images to a worker and waits for their results, in an event loop."""

    def __init__(self, bundle: Bundle, **settings: Any) -> None:
        self.metrics, self.failed = Metrics(), threading.Event()
        self.worker = ModelWorker("x", lambda: bundle, ServeSettings(**settings), self.metrics)
        self.worker.start(self.failed.set)
        while self.worker.state == "loading":
            time.sleep(0.005)
        assert self.worker.error is None

    def send(self, images: Tensor | Array, work: Work = "logits") -> list[asyncio.Future[Any]]:
        loop = asyncio.get_running_loop()
        found = [loop.create_future() for _ in images]
        self.worker.admit(len(images))
        with self.worker._condition:  # the worker sees all of them or none
            for image, future in zip(images, found, strict=True):
                self.worker.submit(Job(work, image, time.monotonic() + 60, future.set_result, loop))
        return found

    def sum(self, name: str) -> float:
        return next(float(line.split()[1]) for line in self.metrics.text().splitlines() if line.startswith(f"{name}{{"))


async def until(condition: Any) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.005)
    return bool(condition())


def some(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def expected(bundle: Bundle, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return bundle.model(images)


def test_every_image_has_its_own_answer(bundle: Bundle, stream: Stream) -> None:
    images = some(42)
    stream.may_compute.set()

    async def run() -> list[Array]:
        caller = Caller(bundle, max_batch=4)
        began = time.monotonic()
        found = await asyncio.gather(*caller.send(images))
        seconds = time.monotonic() - began
        caller.worker.stop()
        assert caller.worker.join(5) and caller.worker._in_flight == 0 and caller.sum("vitrail_images_total") == 42
        assert caller.sum("vitrail_compute_seconds_sum") <= seconds  # no second is counted for two batches
        return found

    found = asyncio.run(run())
    assert stream.most == 2
    torch.testing.assert_close(torch.from_numpy(np.stack(found)), expected(bundle, images), atol=2e-5, rtol=0)


def test_only_a_full_batch_is_launched_early(bundle: Bundle, stream: Stream) -> None:
    async def run() -> None:
        caller = Caller(bundle, max_batch=4)
        found = caller.send(some(7))
        assert await until(lambda: stream.computing == [4])
        await asyncio.sleep(0.1)
        assert stream.computing == [4] and len(caller.worker._jobs) == 3  # the next batch may still grow
        stream.may_compute.set()
        await asyncio.gather(*found)
        stream.may_compute.clear()
        found = caller.send(some(13, 2))
        assert await until(lambda: stream.computing == [4, 4])
        await asyncio.sleep(0.1)
        assert stream.computing == [4, 4] and len(caller.worker._jobs) == 5  # nothing is launched before the first is finished
        stream.may_compute.set()
        await asyncio.gather(*found)
        caller.worker.stop()
        assert caller.worker.join(5)

    asyncio.run(run())


@pytest.mark.parametrize("bad", [0, 5, 11])
def test_an_image_that_fails_fails_alone(bundle: Bundle, stream: Stream, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    images, original = some(12), engine_module._outputs

    def failing(model: Any, kind: Kind, batch: Tensor) -> Tensor:
        if any(torch.equal(image, images[bad]) for image in batch):
            raise VitrailError("This image cannot be computed.")
        return original(model, kind, batch)

    monkeypatch.setattr(engine_module, "_outputs", failing)
    stream.may_compute.set()

    async def run() -> list[Any]:
        caller = Caller(bundle, max_batch=4)
        found = await asyncio.gather(*caller.send(images))
        caller.worker.stop()
        assert caller.worker.join(5) and caller.worker._in_flight == 0
        return found

    found = asyncio.run(run())
    assert isinstance(found[bad], ServiceError) and found[bad].status == 422
    good = [number for number in range(12) if number != bad]
    torch.testing.assert_close(
        torch.from_numpy(np.stack([found[one] for one in good])), expected(bundle, images)[good], atol=2e-5, rtol=0
    )


def test_what_fails_at_its_launch_does_not_disturb_what_is_computed(bundle: Bundle, stream: Stream) -> None:
    images = some(8)
    launch = stream.launch

    def failing(engine: Any, kind: Kind, batch: Tensor) -> Launched:
        if len(batch) == 4 and torch.equal(batch[0], images[4]):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return launch(engine, kind, batch)

    stream.launch = failing  # type: ignore[method-assign]

    async def run() -> list[Any]:
        caller = Caller(bundle, max_batch=4)
        found = caller.send(images[:4])
        assert await until(lambda: stream.computing == [4])
        found += caller.send(images[4:])
        await asyncio.sleep(0.05)
        stream.may_compute.set()
        found = await asyncio.gather(*found)
        caller.worker.stop()
        assert caller.worker.join(5) and caller.worker._in_flight == 0
        return found

    torch.testing.assert_close(torch.from_numpy(np.stack(asyncio.run(run()))), expected(bundle, images), atol=2e-5, rtol=0)


@pytest.mark.parametrize("overlaps", [True, False])
def test_what_a_failed_image_has_made_is_freed_before_the_next_is_computed(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    made, left, launch = list[weakref.ref[Tensor]](), list[int](), Engine.launch

    def failing(self: Engine, kind: Kind, images: list[Image]) -> Launched:
        self.overlaps = overlaps
        left.append(sum(one() is not None for one in made))
        activations = torch.zeros(8)
        made.append(weakref.ref(activations))
        if len(made) == 1:
            raise VitrailError("This image cannot be computed.")
        return launch(self, kind, images)

    monkeypatch.setattr(Engine, "launch", failing)

    async def run() -> None:
        caller = Caller(bundle)
        assert (await caller.send(some(1))[0]).status == 422
        assert await until(lambda: made[0]() is None)  # also while nothing is computed
        assert len(await caller.send(some(1))[0]) == 4
        caller.worker.stop()
        assert caller.worker.join(5)

    asyncio.run(run())
    assert left == [0, 0]


def test_an_analysis_waits_for_its_turn_and_delays_no_answer(bundle: Bundle, stream: Stream) -> None:
    order: list[str] = []

    def analysis(_: Bundle, image: Tensor) -> float:
        order.append("analysis")
        return float(image.sum())

    async def run() -> None:
        caller = Caller(bundle, max_batch=2)
        image = some(1, 7)
        with caller.worker._condition:
            batch = caller.send(some(2))
            analysed = caller.send(image, analysis)
            later = caller.send(some(3, 8))
        batch[0].add_done_callback(lambda _: order.append("batch"))
        assert await until(lambda: stream.computing == [2])
        await asyncio.sleep(0.1)
        assert order == []  # though a batch and an analysis wait
        stream.may_compute.set()
        await asyncio.gather(*batch, *later)
        assert await analysed[0] == pytest.approx(float(image.sum()), abs=1e-3) and sorted(order) == ["analysis", "batch"]
        caller.worker.stop()
        assert caller.worker.join(5)

    asyncio.run(run())


def test_the_end_waits_for_what_is_computed(bundle: Bundle, stream: Stream) -> None:
    async def run() -> None:
        caller = Caller(bundle, max_batch=2)
        found = caller.send(some(5))
        assert await until(lambda: len(stream.computing) == 2)
        caller.worker.stop()
        assert not caller.worker.join(0.1)
        stream.may_compute.set()
        assert all(len(row) == 4 for row in await asyncio.gather(*found))
        assert caller.worker.join(5) and caller.worker.state == "stopped" and not caller.failed.is_set()

    asyncio.run(run())


def test_a_device_that_fails_ends_the_worker_and_answers_both_batches(
    bundle: Bundle, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def check(_: Engine) -> None:
        raise VitrailError("The GPU computes nothing any more.")

    monkeypatch.setattr(engine_module, "_outputs", fails)
    monkeypatch.setattr(Engine, "check", check)

    async def run() -> list[Any]:
        caller = Caller(bundle, max_batch=2)
        found = caller.send(some(5))
        assert await until(lambda: len(stream.computing) == 2)
        stream.may_compute.set()
        answers = await asyncio.wait_for(asyncio.gather(*found), 10)
        assert caller.worker.join(5) and caller.failed.is_set() and caller.worker._in_flight == 0
        assert "nothing any more" in str(caller.worker.error)
        return answers

    assert [one.status for one in asyncio.run(run())] == [503] * 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_overlapped_batches_on_a_gpu_are_those_computed_alone(bundle: Bundle, precision: Any) -> None:
    images = some(64)

    async def run() -> None:
        caller = Caller(bundle, max_batch=4, precision=precision, device="cuda")
        alone = [(await asyncio.gather(*caller.send(images[first : first + 4]))) for first in range(0, 64, 4)]
        for _ in range(20):
            together = await asyncio.gather(*caller.send(images))
            assert np.array_equal(np.stack(together), np.concatenate(alone))
        pixels = (images.clamp(-1, 1) * 127 + 128).to(torch.uint8).numpy()
        one_by_one = [(await asyncio.gather(*caller.send(pixels[first : first + 4])))[0] for first in range(0, 64, 4)]
        assert np.array_equal(np.stack((await asyncio.gather(*caller.send(pixels)))[::4]), np.stack(one_by_one))
        caller.worker.stop()
        assert caller.worker.join(5)

    asyncio.run(run())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("images", [some(4), np.zeros((4, 3, 32, 32), np.uint8)], ids=["normalised", "pixels"])
def test_a_launch_waits_for_nothing_that_the_gpu_computes(bundle: Bundle, images: Any) -> None:
    engine = Engine(bundle, ServeSettings(max_batch=4, device="cuda"))
    engine.warm_up()
    for _ in range(2):  # both places of the input's memory are made, and what else is made once
        engine.launch("logits", list(images)).rows()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [engine.launch("logits", list(images)) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(one.rows()) == 4 for one in launched)
