"""Limits on memory: the bytes of requests, and the pixels of images that are being decoded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vitrail.serve.errors import queue_full


class ByteLimit:
    """Bytes of request bodies in memory; more are refused at once. Used by the event loop alone, so without a lock."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def take(self, count: int) -> None:
        if self.held + count > self.most:
            raise queue_full(1)
        self.held += count

    def release(self, count: int) -> None:
        self.held -= count


class PixelLimit:
    """Pixels that are decoded at a time. An image waits until there is space for it; one alone always has it.

    They are granted in the order in which they were asked for, so that small images do not overtake a large one for ever.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def take(self, count: int, later: Callable[[], None]) -> bool:
        """Take pixels: True if there is space now; otherwise `later` is called as soon as they are taken, by any thread."""
        with self._lock:
            if not self._waiting and self._has_space(count):
                self.held += count
                return True
            self._waiting.append((count, later))
            return False

    def release(self, count: int) -> None:
        granted = []
        with self._lock:
            self.held -= count
            while self._waiting and self._has_space(self._waiting[0][0]):
                taken, later = self._waiting.popleft()
                self.held += taken
                granted.append(later)
        for later in granted:
            later()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Wait for pixels, and release them after the block."""
        space = threading.Event()
        if not self.take(count, space.set):
            space.wait()
        try:
            yield
        finally:
            self.release(count)

    def _has_space(self, count: int) -> bool:
        return self.held == 0 or self.held + count <= self.most
