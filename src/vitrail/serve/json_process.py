"""A second process that parses large JSON.

To parse 32 MB of numbers takes two seconds in which no other thread of the process runs, so that no other client would be answered.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from vitrail.serve.errors import ClientLeft, ServiceError, unavailable
from vitrail.serve.limits import ByteLimit
from vitrail.serve.process import Refused, start

MANY_VALUES, MANY_BYTES = 10_000, 1 << 20
"""JSON of so many values or bytes is parsed in the other process; the event loop parses less within milliseconds."""
Found = TypeVar("Found")


class JsonProcess:
    """The process, which begins with the first large request, and a thread that waits for it."""

    def __init__(self, max_bytes: int) -> None:
        self._waiting = ByteLimit(4 * max_bytes)  # more would wait for seconds; they are refused at once
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="json")
        self._process: subprocess.Popen[bytes] | None = None

    async def run(
        self,
        read: Callable[..., Found],
        body: bytes,
        *arguments: Any,
        length: int,
        values: int,
        deadline: float = float("inf"),
        left: Callable[[], Awaitable[bool]] | None = None,
    ) -> Found:
        """Call `read(body, *arguments)`: here if the JSON in the body is small, which its length and number of values tell.

        Ends early if the client has `left`, and with 503 at the deadline, a time of `time.monotonic`.
        """
        if length < MANY_BYTES and values < MANY_VALUES:
            return read(body, *arguments)
        self._waiting.take(len(body))
        loop, given_up = asyncio.get_running_loop(), threading.Event()
        job = self._thread.submit(self._call, (read, body, *arguments), given_up)
        job.add_done_callback(lambda _: _in_loop(loop, self._waiting.release, len(body)))  # the thread keeps it until then
        try:
            found = await self._before(job, deadline, left)
        finally:
            given_up.set()
        if isinstance(found, Refused):
            raise found.error()
        if isinstance(found, ServiceError):
            raise found
        result: Found = found
        return result

    async def _before(self, job: Future[Any], deadline: float, left: Callable[[], Awaitable[bool]] | None) -> Any:
        waiting = asyncio.wrap_future(job)  # never cancelled: a job that is given up keeps its place until its turn
        while not waiting.done():
            await asyncio.wait([waiting], timeout=max(0.0, min(0.25, deadline - time.monotonic())))
            if not waiting.done() and time.monotonic() >= deadline:
                self._end(job)
                raise unavailable("The JSON was not read before its deadline.")
            if not waiting.done() and left is not None and await left():
                asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), self._end, job)
                raise ClientLeft
        return waiting.result()

    def _end(self, job: Future[Any]) -> None:
        """End the process if it still reads what it was given: it may not answer at all, and others wait for it."""
        if job.running():
            self._stop()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stop()

    def _call(self, request: tuple[Any, ...], given_up: threading.Event) -> Any:
        """Return what the process answers, or an error, since the request may have been given up."""
        if given_up.is_set():
            return None
        try:
            if self._process is None or self._process.poll() is not None:
                self._process = start("vitrail.serve.json_process")
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            pickle.dump(request, process.stdin, protocol=5)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except Exception:  # it was ended, by the system or by `_stop`; after any other error it may still send this answer
            self._stop()
            return unavailable("The process that reads JSON has ended.")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[int], None], count: int) -> None:
    with suppress(RuntimeError):  # it is closed: the service has ended
        loop.call_soon_threadsafe(function, count)


def main() -> None:
    """Answer requests of `JsonProcess` from standard input until it ends."""
    while True:
        try:
            read, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found: Any = read(*arguments)
        except ServiceError as error:
            found = Refused(error.status, error.message)
        pickle.dump(found, sys.stdout.buffer, protocol=5)
        sys.stdout.buffer.flush()
