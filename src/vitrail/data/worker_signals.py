"""Signals in data workers, which a run that saves on a signal needs until it has saved."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vitrail.errors import VitrailError

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
"""Signals that ask a process to end. Windows has only the first two."""


def caught_signals() -> tuple[int, ...]:
    """Return which of them this process catches, so that its workers must not end by them."""
    left = (None, signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
    return tuple(number for number in STOP_SIGNALS if signal.getsignal(number) not in left)


@contextmanager
def blocked(numbers: Sequence[int]) -> Iterator[None]:
    """Block signals in this thread while the block runs. Processes and threads that it starts have them blocked for ever.

    Only where `end_by_parent` can tell who sent a signal: on macOS it could not, and then nothing would end a worker that hangs.
    """
    if not numbers or not hasattr(signal, "sigwaitinfo"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_by_parent(worker: int) -> None:
    """Initialise a worker that was started with SIGTERM blocked: from its parent, the signal still ends it, as torch expects."""
    if hasattr(signal, "sigwaitinfo") and signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        threading.Thread(target=_wait_for_end, args=(os.getppid(),), daemon=True).start()


def _wait_for_end(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass  # to the whole process group; the parent decides when to end
    os._exit(0)


def raise_worker_error(error: RuntimeError) -> None:
    """Raise a sentence if this is torch's error that a worker was killed. Torch may raise that anywhere: it is told by a signal."""
    text = str(error)
    if "DataLoader worker (pid" not in text:
        return
    found = re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)(?: is killed by signal: (\w[\w ]*))?", text)
    process = f" (process {found[1]})" if found else ""
    cause = f": {found[2]}" if found and found[2] else ""
    if "shared memory" in text or "Bus error" in text:
        advice = "The shared memory (/dev/shm) is too small: enlarge it (docker run --shm-size 8g), or use fewer workers."
    else:
        advice = "Most often the memory was too small: use fewer workers."
    raise VitrailError(f"A process that reads images ended unexpectedly{process}{cause}. {advice}") from error
