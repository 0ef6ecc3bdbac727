"""Read byte ranges of remote files: retried, and ahead of their use, adjacent ones in one request."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from vitrail.errors import VitrailError

Span = tuple[str, int, int]
"""File, offset and size."""
Read = Callable[[str, int, int], bytes]

_REQUESTS = 8
_GAP, _MAX_REQUEST = 1 << 18, 1 << 24  # bytes: what lies between two images costs less than a request of its own
_MAX_WAITING = 1 << 14  # images that were requested and not used, because their reader stopped early
_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds between tries


def with_retries(read: Read, file: str, offset: int, size: int) -> bytes:
    """Read a range; a network fails now and then. In the end it is an error of the connection, not a bad image."""
    for pause in (*_PAUSES, None):
        try:
            return read(file, offset, size)
        except Exception as error:  # aiohttp's errors have no common class with those of other file systems
            if pause is None or isinstance(error, FileNotFoundError):
                raise VitrailError(
                    f"{file} cannot be read ({type(error).__name__}: {error}). Check the URL and the connection, and run the same "
                    "command again."
                ) from error
            time.sleep(pause)
    raise AssertionError


class ReadAhead:
    """Ranges that are being read in the background. It holds what was requested and not yet taken."""

    def __init__(self, read: Read) -> None:
        self._read, self._process = read, os.getpid()
        self._lock, self._pool = threading.Lock(), ThreadPoolExecutor(_REQUESTS, thread_name_prefix="read-ahead")
        self._waiting: dict[Span, tuple[Future[bytes], int]] = {}

    @property
    def usable(self) -> bool:
        """Whether its threads exist here: a forked process has a copy without them."""
        return self._process == os.getpid()

    def start(self, spans: Iterable[Span]) -> None:
        """Request these ranges, except those that already are."""
        with self._lock:
            for run in _runs(span for span in spans if span not in self._waiting):
                file, first = run[0][:2]
                size = run[-1][1] + run[-1][2] - first
                future = self._pool.submit(with_retries, self._read, file, first, size)
                self._waiting |= dict.fromkeys(run, (future, first))
            for span in list(self._waiting)[:-_MAX_WAITING]:
                del self._waiting[span]

    def take(self, span: Span) -> bytes | None:
        """Return a range that was requested, when it is there; None if it was not."""
        with self._lock:
            future, first = self._waiting.pop(span, (None, 0))
        if future is None:
            return None
        return future.result()[span[1] - first : span[1] - first + span[2]]


def _runs(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Group ranges that follow each other in a file."""
    run: list[Span] = []
    for file, offset, size in spans:
        end = run[-1][1] + run[-1][2] if run else 0
        if run and (run[0][0] != file or not end <= offset <= end + _GAP or offset + size - run[0][1] > _MAX_REQUEST):
            yield run
            run = []
        run.append((file, offset, size))
    if run:
        yield run
