"""How long training waits for data, and how many workers a machine can feed it with."""

from __future__ import annotations

import os
import time


class WaitMeter:
    """Adds up the time spent waiting for batches and the time between them, since it was last read."""

    def __init__(self) -> None:
        self.waited = self.worked = 0.0
        self._left: float | None = None

    def begin(self) -> float:
        """The consumer asks for a batch: the time since it got the last one was work."""
        now = time.perf_counter()
        if self._left is not None:
            self.worked += now - self._left
        return now

    def end(self, began: float) -> None:
        """The batch is there."""
        self._left = time.perf_counter()
        self.waited += self._left - began

    def share(self) -> float:
        """The part of the time that went into waiting, from 0 to 1."""
        whole = self.waited + self.worked
        return self.waited / whole if whole > 0 else 0.0

    def reset(self) -> None:
        self.waited = self.worked = 0.0
        self._left = None

    def advice(self, workers: int, ranks: int = 1) -> str:
        """A sentence where data holds training up, empty where it does not."""
        share = self.share()
        if share < 0.2:
            return ""
        most = most_workers(ranks)
        ways = [f"--workers {min(most, max(2, 2 * workers))}"] if workers < most else []
        ways.append("smaller images stored ready to read (`vitrail data pack`)")
        return f"Training waits for data {share:.0%} of the time: try {' or '.join(ways)}."


def most_workers(ranks: int = 1) -> int:
    """Processors this process may use, shared by the ranks on this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // max(1, ranks))


def worker_count(wanted: int | None, ranks: int = 1) -> tuple[int, str]:
    """Workers to start for each rank, and a note where that is fewer than wanted: more would only stand in the way."""
    most = most_workers(ranks)
    if wanted is None:
        return min(most, 16), ""
    if wanted > most:
        shared = f" shared by {ranks} ranks" if ranks > 1 else ""
        return most, f"Using {most} workers, not {wanted}: this machine has {most * ranks} processors{shared}."
    return max(0, wanted), ""
