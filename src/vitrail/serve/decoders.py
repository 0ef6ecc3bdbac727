"""Decode images in threads of the service, or in helper processes.

Python runs one thread of a process at a time, and of decoding a photo about a fifth is Python. So on many cores threads wait for
each other and for the event loop. A process decodes on a core of its own, and one that crashes or hangs takes no other image with
it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from vitrail.cpus import usable_cpus
from vitrail.data.preprocess import Preprocess
from vitrail.serve.decoder import ignore_warnings
from vitrail.serve.decoder_processes import DecoderProcesses
from vitrail.serve.errors import ServiceError
from vitrail.serve.images import Decoded, decode
from vitrail.serve.limits import PixelLimit
from vitrail.serve.settings import ServeSettings

_MOST = 16
_FEW = 4  # so many threads seldom wait for each other
Done = Callable[[Decoded | BaseException], None]


class Cancellable(Protocol):
    def cancel(self) -> bool:
        """Give the image up, and tell whether nothing has it any more; otherwise its end will still be told."""


class Decoders:
    """What decodes images, and threads for other work that would keep the event loop."""

    def __init__(self, settings: ServeSettings, pixels: PixelLimit) -> None:
        self.count = count = settings.decoders or min(_MOST, usable_cpus())
        many = settings.decode_in == "auto" and count > _FEW and hasattr(os, "readv")
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="decode", initializer=ignore_warnings)
        self.processes = DecoderProcesses(count, settings, pixels) if settings.decode_in == "processes" or many else None
        self._settings, self._pixels = settings, pixels

    def prepare(self) -> None:
        """Wait until images can be decoded without delay."""
        if self.processes is not None:
            with suppress(ServiceError):  # the service ends
                self.processes.prepare()

    def decode(self, data: bytes, preprocess: Preprocess, deadline: float, done: Done) -> Cancellable:
        """Decode a file, and call `done` in the event loop. A process that has not answered soon after the
        `deadline`, a time of `time.monotonic`, is ended."""
        if self.processes is not None:
            return self.processes.decode(data, preprocess, deadline, done)
        loop, image = asyncio.get_running_loop(), _InThread(data)

        def finished(job: Future[Decoded]) -> None:
            if not job.cancelled():
                with suppress(RuntimeError):  # the loop is closed: the service has ended
                    loop.call_soon_threadsafe(done, job.exception() or job.result())

        image.job = self.threads.submit(lambda: decode(image.data, preprocess, self._settings, self._pixels))
        image.job.add_done_callback(finished)
        return image

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.processes is not None:
            self.processes.close()


class _InThread:
    """An image on its way through a thread. One that is given up waits for its turn, but its bytes are freed."""

    job: Future[Decoded]

    def __init__(self, data: bytes) -> None:
        self.data = data

    def cancel(self) -> bool:
        cancelled = self.job.cancel()
        if cancelled:
            self.data = b""
        return cancelled
