"""Prepare the next batch on the GPU while the model is trained on the current one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from vitrail.data.batch import Batch, HostBatch
from vitrail.data.data_wait import DataWaitTimer

_JOIN_SECONDS = 10.0  # a worker that hangs must not hang the process that stops it


@dataclass(frozen=True)
class _Prepared:
    batch: Batch
    ready: torch.cuda.Event | None
    read_seconds: float
    """How long the thread waited for the images of this batch."""


class _End:
    """There are no more batches."""


class DevicePrefetch(Iterator[Batch]):
    """Iterate over transformed batches. A thread prepares one batch ahead, on a CUDA stream of its own.

    Augmentation on a GPU launches hundreds of small kernels, which takes Python about as long as a training step of a small model.
    In another thread and on another stream, both happen at the same time. The batches are the same as without the thread.
    """

    def __init__(
        self, host_batches: Iterator[HostBatch], transform: Callable[[HostBatch], Batch], device: torch.device, timer: DataWaitTimer
    ) -> None:
        self._device, self._timer = device, timer
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._prepared: SimpleQueue[_Prepared | _End | BaseException] = SimpleQueue()
        # Made here, since the thread has a current device of its own.
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if stream is not None:  # tensors that the transform holds may still be on their way
            stream.wait_stream(torch.cuda.current_stream(device))
        arguments = (host_batches, transform, stream, self._requests, self._prepared)
        # The thread does not refer to this object, so that dropping the last reference to it ends the thread.
        thread = threading.Thread(target=_prepare, args=arguments, name="vitrail-device-prefetch", daemon=True)
        self.close = weakref.finalize(self, _stop, thread, self._requests)
        self._requests.put(True)
        thread.start()

    def __next__(self) -> Batch:
        started = self._timer.start()
        found = self._prepared.get()
        if not isinstance(found, _Prepared):
            self._prepared.put(found)  # for the next call: the thread has ended
            if isinstance(found, _End):
                raise StopIteration
            raise found
        self._requests.put(True)
        self._timer.stop(started, at_most=found.read_seconds)
        if found.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(found.ready)
            for tensor in (found.batch.images, found.batch.targets):
                tensor.record_stream(stream)  # its memory must not be reused while this stream reads it
        return found.batch


def _prepare(
    host_batches: Iterator[HostBatch],
    transform: Callable[[HostBatch], Batch],
    stream: torch.cuda.Stream | None,
    requests: SimpleQueue[bool],
    prepared: SimpleQueue[_Prepared | _End | BaseException],
) -> None:
    """Run in the thread: prepare a batch per request, until a request is False."""
    try:
        with torch.cuda.stream(stream):
            while requests.get():
                started = time.perf_counter()
                host = next(host_batches, None)
                if host is None:
                    break
                seconds = time.perf_counter() - started
                batch = transform(host)
                del host  # its buffer is free for the next batch
                prepared.put(_Prepared(batch, None if stream is None else stream.record_event(), seconds))
                del batch
        prepared.put(_End())
    except BaseException as error:  # raised again where the batch is awaited
        prepared.put(error)


def _stop(thread: threading.Thread, requests: SimpleQueue[bool]) -> None:
    requests.put(False)
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
