"""Batches prepared by a thread: the same ones, in order, with errors and waiting times where they belong."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.data.memory_splits import stored
from vitrail.data.augment.spec import Augment
from vitrail.data.batch import Batch
from vitrail.data.data_wait import DataWaitTimer
from vitrail.data.device_prefetch import DevicePrefetch
from vitrail.data.loader import TrainLoader
from vitrail.data.preprocess import preset
from vitrail.errors import VitrailError

CPU = torch.device("cpu")


def loader(device: str = "cpu", workers: int = 0) -> TrainLoader:
    augment = Augment(randaugment="timm", randaugment_magnitude=9, erase=0.5, mixup=0.2, cutmix=1.0, device="gpu")
    preprocess = preset("imagenet", size=16)
    return TrainLoader(stored(50), preprocess=preprocess, augment=augment, batch=8, seed=3, workers=workers, device=device)


def prefetched(host_batches: Iterator[object], transform: object, timer: DataWaitTimer | None = None) -> DevicePrefetch:
    return DevicePrefetch(host_batches, transform, CPU, timer or DataWaitTimer())  # type: ignore[arg-type]


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "vitrail-device-prefetch"]


def wait_for_no_thread() -> None:
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def test_the_batches_are_those_of_the_loader() -> None:
    expected = list(itertools.islice(loader(), 9))
    plain = loader()
    host_batches = plain._host_batches(_slices(plain))
    found = list(itertools.islice(prefetched(host_batches, plain.transforms), 9))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)
        assert (one.epoch, one.step) == (other.epoch, other.step)
    wait_for_no_thread()


def _slices(plain: TrainLoader) -> Iterator[object]:
    from vitrail.data.loader import _endless_slices

    return _endless_slices(plain.order, 0, plain._slicing)


def test_one_batch_is_prepared_ahead_and_no_more() -> None:
    made: list[int] = []
    batches = prefetched(iter(range(100)), lambda host: made.append(host) or host)
    assert next(batches) == 0
    deadline = time.monotonic() + 10
    while made != [0, 1] and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert made == [0, 1]
    assert list(batches) == list(range(1, 100))
    with pytest.raises(StopIteration):
        next(batches)


def test_an_error_in_the_thread_is_raised_every_time() -> None:
    def transform(host: int) -> int:
        if host == 1:
            raise VitrailError("image 1 is broken")
        return host

    batches = prefetched(iter(range(3)), transform)
    assert next(batches) == 0
    for _ in range(2):
        with pytest.raises(VitrailError, match="image 1 is broken"):
            next(batches)
    wait_for_no_thread()


def test_the_thread_ends_when_it_is_closed_or_dropped() -> None:
    batches = prefetched(itertools.count(), lambda host: host)
    assert next(batches) == 0 and threads()
    batches.close()
    assert not threads()
    batches = prefetched(itertools.count(), lambda host: host)
    assert next(batches) == 0 and threads()
    del batches
    gc.collect()
    assert not threads()


def test_after_closing_there_are_no_more_batches() -> None:
    """Only the one that was ready. Nobody waits for a thread that has ended."""
    batches, found = prefetched(itertools.count(), lambda host: host), list[object]()
    assert next(batches) == 0
    batches.close()
    reader = threading.Thread(target=lambda: found.extend(batches), daemon=True)
    reader.start()
    reader.join(10)
    assert not reader.is_alive() and found in ([], [1])


def test_only_reading_counts_as_waiting_for_data() -> None:
    """A slow transform is not cured by more workers."""

    def slow(host: int) -> int:
        time.sleep(0.2)
        return host

    timer = DataWaitTimer()
    batches = prefetched(iter(range(2)), slow, timer)
    assert list(itertools.islice(batches, 2)) == [0, 1]
    assert timer.compute_seconds > 0.3 and timer.wait_seconds < timer.compute_seconds / 4  # a busy machine makes both longer

    def reading() -> Iterator[int]:
        for number in range(2):
            time.sleep(0.2)
            yield number

    timer = DataWaitTimer()
    batches = prefetched(reading(), lambda host: host, timer)
    assert list(itertools.islice(batches, 2)) == [0, 1]
    assert timer.wait_seconds > 0.3


class RecordedStream:
    """Stands for a CUDA stream, and notes what happens."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        notes.append(f"made in {threading.current_thread().name}")

    def wait_stream(self, other: str) -> None:
        self.notes.append(f"waits for {other}")

    def record_event(self) -> None:
        return None


def test_the_threads_stream_begins_after_what_was_launched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's stream may still be writing tensors that a transform holds. And a new thread's current device is 0."""
    notes: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordedStream(notes))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {threading.current_thread().name}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    host_batches: Any = iter([0])
    batches = DevicePrefetch(host_batches, lambda host: notes.append("transform"), torch.device("cuda"), DataWaitTimer())  # type: ignore[arg-type, func-returns-value]
    next(batches)
    main = threading.current_thread().name
    assert notes == [f"made in {main}", f"waits for that of {main}", "transform"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_on_a_gpu_the_first_batch_waits_for_the_transforms_tensors() -> None:
    def transform(host: int) -> Batch:
        return Batch(late + host, late + host, torch.zeros(1), 0, 0, 0, 1, 1)

    late = torch.zeros(1000, device="cuda")
    transform(1)  # loads the kernel, which would wait for the GPU below
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    late.fill_(3)
    batches: Any = DevicePrefetch(iter([1]), transform, late.device, DataWaitTimer())  # type: ignore[arg-type]
    assert next(batches).images.eq(4).all()


@needs_gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_batches_do_not_change_while_they_are_used(workers: int) -> None:
    """The thread's stream must not write over a batch that the model still reads, nor the model read one that is not ready."""
    expected = []
    plain = loader("cuda")
    for host in itertools.islice(plain._host_batches(_slices(plain)), 30):
        batch = plain.transforms(host)
        torch.cuda.synchronize()
        expected.append(batch.images.cpu())
    busy = torch.randn(4096, 4096, device="cuda")
    copies = []
    ahead = loader("cuda", workers)
    for batch in itertools.islice(ahead, 30):
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)  # the GPU is behind the CPU when the copy below is launched
        copies.append(batch.images + 0)
        del batch
    ahead.close()
    for one, other in zip(copies, expected, strict=True):
        assert torch.equal(one.cpu(), other)
