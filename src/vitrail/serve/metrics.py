"""Counters and histograms in Prometheus' text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Every metric of the service; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._help: dict[str, tuple[str, str]] = {}
        self._counts: dict[str, dict[_Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, dict[_Labels, _Histogram]] = defaultdict(dict)
        self._bounds: dict[str, tuple[float, ...]] = {}
        self._gauges: dict[str, dict[_Labels, Callable[[], float]]] = defaultdict(dict)
        self._declare("vitrail_requests_total", "counter", "Requests by path and status.")
        self._declare("vitrail_images_total", "counter", "Images computed.")
        self._declare("vitrail_images_given_up_total", "counter", "Images that were cancelled or whose deadline passed.")
        self._declare("vitrail_batch_size", "histogram", "Images per batch.", IMAGES)
        self._declare("vitrail_queue_seconds", "histogram", "Time from the decoded image to its computation.", SECONDS)
        self._declare("vitrail_compute_seconds", "histogram", "Time to compute a batch, once the one before is computed.", SECONDS)
        self._declare("vitrail_request_seconds", "histogram", "Time from the first byte of a request to its answer.", SECONDS)
        self._declare("vitrail_images_in_flight", "gauge", "Images in the service, from upload to answer.")
        self._declare("vitrail_queue_length", "gauge", "Decoded images that wait.")

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        with self._lock:
            self._counts[name][_key(labels)] += amount

    def observe(self, name: str, *values: float, **labels: str) -> None:
        with self._lock:
            histograms = self._histograms[name]
            key = _key(labels)
            if key not in histograms:
                histograms[key] = _Histogram(self._bounds[name])
            for value in values:
                histograms[key].add(value)

    def gauge(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Register a function that is called whenever metrics are read."""
        self._gauges[name][_key(labels)] = read

    def text(self) -> str:
        lines = []
        with self._lock:
            for name, (kind, explanation) in self._help.items():
                lines += [f"# HELP {name} {explanation}", f"# TYPE {name} {kind}"]
                lines += [f"{name}{_labels(key)} {_number(value)}" for key, value in sorted(self._counts.get(name, {}).items())]
                lines += [f"{name}{_labels(key)} {_number(read())}" for key, read in sorted(self._gauges.get(name, {}).items())]
                for key, histogram in sorted(self._histograms.get(name, {}).items()):
                    lines += histogram.lines(name, key)
        return "\n".join(lines) + "\n"

    def _declare(self, name: str, kind: str, explanation: str, bounds: tuple[float, ...] = ()) -> None:
        self._help[name], self._bounds[name] = (kind, explanation), bounds


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, key: _Labels) -> list[str]:
        found, lines = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            found += count
            limit = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(f"{name}_bucket{_labels((*key, ('le', limit)))} {found}")
        return [*lines, f"{name}_sum{_labels(key)} {_number(self.sum)}", f"{name}_count{_labels(key)} {found}"]


def _number(value: float) -> str:
    """Return every digit: with six, a counter beyond a million would stand still for many requests."""
    return str(int(value)) if value == int(value) else repr(float(value))


def _key(labels: dict[str, str]) -> _Labels:
    return tuple(sorted(labels.items()))


def _labels(key: _Labels) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in key) + "}" if key else ""
