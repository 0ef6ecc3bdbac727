"""A second process that parses large JSON.

To parse 32 MB of numbers takes two seconds in which no other thread of the process runs, so that no other client would be answered.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vitrail.serve.errors import ServiceError, unavailable
from vitrail.serve.limits import ByteLimit

MANY_VALUES, MANY_BYTES = 10_000, 1 << 20
"""JSON of so many values or bytes is parsed in the other process; the event loop parses less within milliseconds."""
Found = TypeVar("Found")


class JsonProcess:
    """The process, which begins with the first large request, and a thread that waits for it."""

    def __init__(self, max_bytes: int) -> None:
        self._waiting = ByteLimit(4 * max_bytes)  # more would wait for seconds; they are refused at once
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="json")
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self, read: Callable[..., Found], body: bytes, *arguments: Any, length: int, values: int) -> Found:
        """Call `read(body, *arguments)`: here if the JSON in the body is small, which its length and number of values tell."""
        if length < MANY_BYTES and values < MANY_VALUES:
            return read(body, *arguments)
        self._waiting.take(len(body))
        try:
            found: Any = await asyncio.wrap_future(self._thread.submit(self._call, (read, body, *arguments)))
        finally:
            self._waiting.release(len(body))
        if isinstance(found, _Refused):
            raise ServiceError(found.status, found.message)
        result: Found = found
        return result

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stop()

    def _call(self, request: tuple[Any, ...]) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin, protocol=5)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:  # it was ended, by the system or by `close`
            self._stop()
            raise unavailable("The process that reads JSON has ended.") from error

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


class _Refused:
    """A `ServiceError` on its way between two processes."""

    def __init__(self, error: ServiceError) -> None:
        self.status, self.message = error.status, error.message


def _start() -> subprocess.Popen[bytes]:
    """Start the process with the paths of this one. Ctrl-C does not reach it; it ends with its input."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", "from vitrail.serve.json_process import main; main()"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **paths}, start_new_session=True
    )


def main() -> None:
    """Answer requests of `JsonProcess` from standard input until it ends.

    A service manager may send SIGTERM to every process of the service: what was accepted is still parsed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            read, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found: Any = read(*arguments)
        except ServiceError as error:
            found = _Refused(error)
        pickle.dump(found, sys.stdout.buffer, protocol=5)
        sys.stdout.buffer.flush()
