"""Measure how long training waits for data, and choose the number of loader workers."""

from __future__ import annotations

import math
import time

from vitrail.cpus import usable_cpus
from vitrail.errors import counted


class DataWaitTimer:
    """Sum the time spent waiting for batches, and the time between them, since the last reset."""

    def __init__(self) -> None:
        self.wait_seconds = self.compute_seconds = 0.0
        self._received: float | None = None

    def start(self) -> float:
        """Note that a batch is requested: the time since the last one was received counts as compute."""
        now = time.perf_counter()
        if self._received is not None:
            self.compute_seconds += now - self._received
        return now

    def stop(self, started: float, *, at_most: float = math.inf) -> None:
        """Note that the batch has been received. What is longer than `at_most` was not spent on reading images."""
        self._received = time.perf_counter()
        seconds = self._received - started
        self.wait_seconds += min(seconds, at_most)
        self.compute_seconds += max(seconds - at_most, 0.0)

    def fraction(self) -> float:
        """Return the fraction of the time spent waiting, from 0 to 1; what is computed since the last batch counts, too."""
        unfinished = 0.0 if self._received is None else time.perf_counter() - self._received
        total = self.wait_seconds + self.compute_seconds + unfinished
        return self.wait_seconds / total if total > 0 else 0.0

    def reset(self, *, idle: bool = False) -> None:
        """Begin an interval. With `idle` nothing was computed before it, such as before the first batch."""
        self.wait_seconds = self.compute_seconds = 0.0
        self._received = None if idle or self._received is None else time.perf_counter()

    def advice(self, workers: int, ranks: int = 1) -> str:
        """Return a sentence if data loading slows training down, else an empty string."""
        fraction = self.fraction()
        if fraction < 0.2:
            return ""
        limit = max_workers(ranks)
        options = [f"--workers {min(limit, max(2, 2 * workers))}"] if workers < limit else []
        options.append("decoding and resizing the images once (`vitrail data pack`)")
        return f"Training waits for data {fraction:.0%} of the time: try {' or '.join(options)}."


def max_workers(ranks: int = 1) -> int:
    """Return the CPUs that this process may use, divided by the ranks on this machine."""
    return max(1, usable_cpus() // max(1, ranks))


def worker_count(requested: int | None, ranks: int = 1) -> tuple[int, str]:
    """Return the workers to start per rank, and a note if they are fewer than requested: more would slow each other."""
    limit = max_workers(ranks)
    if requested is None:
        return min(limit, 16), ""
    if requested > limit:
        workers = counted(limit, "worker") + (" per rank" if ranks > 1 else "")
        cpus = counted(limit * ranks, "CPU") + (f" for {ranks} ranks" if ranks > 1 else "")
        return limit, f"Using {workers}, not {requested}: this process may use {cpus}."
    return max(0, requested), ""
