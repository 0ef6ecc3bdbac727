"""`Flight`: the images of one request on their way through decoding and the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from vitrail.data.preprocess import Preprocess
from vitrail.serve.decoders import Cancellable, Decoders
from vitrail.serve.engine import Image
from vitrail.serve.errors import ServiceError, unavailable
from vitrail.serve.images import Decoded
from vitrail.serve.worker import Job, ModelWorker, Work


class Flight:
    """Images that were admitted. The place of each is free when neither a thread nor a process has it any more.

    All of this runs in the event loop. What decodes and what computes call it back, so that no image needs a task of its own.
    """

    def __init__(self, worker: ModelWorker, work: Work, deadline: float, images: int) -> None:
        self.worker, self.work, self.deadline = worker, work, deadline
        self.results: list[Any] = [None] * images
        self.rotated = [False] * images
        """Whether an image is stored rotated and the preprocessing ignores that."""
        self._images = [_ImageInFlight(self, number) for number in range(images)]
        self._unfinished = images
        self._finished: asyncio.Future[None] | None = None

    def begin(self, images: Sequence[bytes | Image], decoders: Decoders, preprocess: Preprocess | None) -> None:
        for number, image in enumerate(images):
            try:
                self._images[number].begin(image, decoders, preprocess)
            except BaseException:
                self.worker.release(len(images) - number)
                raise

    async def wait(self, seconds: float) -> bool:
        """Wait until every image has its result, and tell whether that is so. What misses its deadline is given up."""
        if self._unfinished:
            loop, left = asyncio.get_running_loop(), self.deadline - time.monotonic()
            self._finished = loop.create_future()
            timer = loop.call_later(min(seconds, left) if left > 0 else seconds, self._wake)
            try:
                await self._finished
            finally:
                timer.cancel()
            late = time.monotonic() - self.deadline
            if self._unfinished and late >= 0:
                for one in self._images:
                    one.give_up(even_begun=late >= self.worker.settings.deadline)
        return not self._unfinished

    def cancel(self) -> None:
        """Compute nothing of this that has not begun."""
        for one in self._images:
            one.cancel()

    def finish(self, number: int, result: Any) -> None:
        self.results[number] = result
        self._unfinished -= 1
        if not self._unfinished:
            self._wake()

    def _wake(self) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)


class _ImageInFlight:
    __slots__ = ("_arrived", "_cancelled", "_decoders", "_decoding", "_done", "_flight", "_job", "_number")

    def __init__(self, flight: Flight, number: int) -> None:
        self._flight, self._number, self._done, self._cancelled = flight, number, False, False
        self._decoding: Cancellable | None = None
        self._job: Job | None = None

    def begin(self, image: bytes | Image, decoders: Decoders, preprocess: Preprocess | None) -> None:
        if not isinstance(image, bytes):
            self._queue(image)
            return
        assert preprocess is not None
        self._arrived, self._decoders = time.monotonic(), decoders.count
        self._flight.worker.decoding.images += 1
        try:
            decoding = decoders.decode(image, preprocess, self._flight.deadline, self._decoded)
        except BaseException:
            self._flight.worker.decoding.images -= 1
            raise
        if not self._done and self._job is None:  # otherwise it has failed already
            self._decoding = decoding

    def give_up(self, *, even_begun: bool) -> None:
        if not self._done and (even_begun or self._job is None or not self._job.begun):
            self._finish(unavailable("The image was not computed before its deadline."))
            self.cancel()

    def cancel(self) -> None:
        if self._decoding is not None:
            if not self._cancelled:
                self._flight.worker.count_given_up()
            if self._decoding.cancel():
                self._decoding = None
                self._flight.worker.decoding.images -= 1
                self._flight.worker.release(1)
        elif self._job is not None and not self._job.begun:
            self._flight.worker.withdraw(self._job)
        self._done = self._cancelled = True

    def _decoded(self, found: Decoded | BaseException) -> None:
        self._decoding = None
        self._flight.worker.decoding.ended(self._arrived, self._decoders)
        if self._done or isinstance(found, BaseException):
            self._flight.worker.release(1)
            if not self._done and time.monotonic() >= self._flight.deadline:
                self._flight.worker.count_given_up()
            self._finish(found)
        else:
            self._flight.rotated[self._number] = found.rotated
            self._queue(found.pixels)

    def _queue(self, image: Image) -> None:
        flight = self._flight
        self._job = Job(flight.work, image, flight.deadline, self._finish, asyncio.get_running_loop())
        try:
            flight.worker.submit(self._job)
        except ServiceError as error:
            self._finish(error)

    def _finish(self, result: Any) -> None:
        if not self._done:
            self._done = True
            self._flight.finish(self._number, result)
