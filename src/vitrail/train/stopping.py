"""Stopping a run: it finishes its step, saves, and says how to resume."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether the run is to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @contextmanager
    def handling_signals(self) -> Iterator[Stop]:
        """Catch SIGTERM and the first Ctrl-C while the block runs; a second Ctrl-C interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may handle signals
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._handle)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.signal = number
