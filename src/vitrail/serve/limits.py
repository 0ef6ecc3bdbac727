"""Limits on memory: the bytes of requests, and the pixels of images that are being decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
    """Pixels that threads decode at a time. A thread waits until there is space for its image; an image alone always has it.

    The first lock keeps the order, so that small images do not overtake a large one for ever.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._order = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        with self._order, self._changed:
            self._changed.wait_for(lambda: self.held == 0 or self.held + count <= self.most)
            self.held += count
        try:
            yield
        finally:
            with self._changed:
                self.held -= count
                self._changed.notify_all()
