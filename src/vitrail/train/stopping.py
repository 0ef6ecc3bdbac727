"""Stopping a run: it finishes its step, saves, and says how to resume."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vitrail.data.worker_signals import STOP_SIGNALS

# Launchers signal a process twice: `timeout` and `torchrun` signal it and its process group.
_REPEATS = 1.0  # seconds in which a signal counts as the same


class Stop:
    """Whether the run is to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @contextmanager
    def handling_signals(self) -> Iterator[Stop]:
        """Catch the signals that ask a process to end, while the block runs; a second one ends it at once.

        Signals that are ignored stay so: SIGHUP under `nohup`, SIGINT and SIGQUIT in a script's background.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may handle signals
            return
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        before = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
        for number in before:
            signal.signal(number, self._handle)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.signal, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _REPEATS:
            if number == signal.SIGINT:
                raise KeyboardInterrupt  # a notebook lives on
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
