"""Means and standard deviations of a study's rows over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitrail.study.definition import METRICS, Metric, Study
from vitrail.study.rows import DONE, FAILED, LEFT_OUT, Row


@dataclass(frozen=True)
class Value:
    """A metric of one point: the mean over seeds."""

    mean: float
    std: float | None
    """Over seeds; None with one seed."""
    seeds: int
    test_images: int
    usual_std: float | None = None
    """The median over the study's points that have several seeds."""

    @property
    def error(self) -> float:
        """The standard error of the mean over seeds; with one seed, that of counting hits among the test images.

        Few seeds are often alike by chance. So a deviation counts as at least the usual one, and one test image; a point with one
        seed among points with several has the usual one.
        """
        if self.std is not None:
            return max(self.std, self.usual_std or 0.0, 1 / max(self.test_images, 1)) / math.sqrt(self.seeds)
        counting = math.sqrt(max(self.mean * (1 - self.mean), 1e-6) / max(self.test_images, 1))
        return max(counting, self.usual_std or 0.0)

    def text(self) -> str:
        std = f" ± {100 * self.std:.1f}" if self.std is not None else ""
        return f"{100 * self.mean:.1f}{std} %"


@dataclass(frozen=True)
class Entry:
    """One point of a study, over its seeds."""

    series: str
    label: str
    rows: tuple[Row, ...]
    usual_std: Mapping[Metric, float]
    """Of each metric, the median over all points that have several seeds."""

    @property
    def name(self) -> str:
        return f"{self.series} {self.label}"

    @property
    def first(self) -> Row:
        return self.rows[0]

    def number(self, column: str) -> float | None:
        """Return the mean of a column over the seeds that have it."""
        values = [value for row in self.rows if (value := getattr(row, column)) is not None]
        return statistics.fmean(values) if values else None

    def gaps(self, one: str, two: str) -> list[float]:
        """Return the difference of two columns for each seed that has both."""
        pairs = [(getattr(row, one), getattr(row, two)) for row in self.rows]
        return [first - second for first, second in pairs if first is not None and second is not None]

    def value(self, metric: Metric) -> Value | None:
        values = _values(self.rows, metric)
        if not values:
            return None
        std = statistics.stdev(values) if len(values) > 1 else None
        return Value(statistics.fmean(values), std, len(values), self.first.test_images or 0, self.usual_std.get(metric))


def _values(rows: Sequence[Row], metric: Metric) -> list[float]:
    return [value for row in rows if (value := getattr(row, metric)) is not None]


class Summary:
    """The results of a study, point by point."""

    def __init__(self, study: Study, rows: Sequence[Row]) -> None:
        self.study, self.rows = study, list(rows)
        grouped: dict[tuple[str, str], list[Row]] = {}
        for row in sorted(rows, key=lambda one: (one.point, one.seed)):
            if row.status == DONE:
                grouped.setdefault((row.series, row.label), []).append(row)
        several = {metric: [one for rows in grouped.values() if len(one := _values(rows, metric)) > 1] for metric in METRICS}
        usual = {metric: statistics.median(map(statistics.stdev, found)) for metric, found in several.items() if found}
        self.entries = [Entry(series, label, tuple(group), usual) for (series, label), group in grouped.items()]
        self.failed = [row for row in rows if row.status == FAILED]
        self.left_out = [row for row in rows if row.status == LEFT_OUT]

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(entry.series for entry in self.entries))

    @property
    def seeds(self) -> str:
        """How many seeds the points have: `3`, or `1 to 3`."""
        counts = [len(entry.rows) for entry in self.entries]
        return f"{max(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that were measured, in the order of the study's panels."""
        return [one for one in self.study.plot.metrics if any(entry.value(one) is not None for entry in self.entries)]

    def line(self, series: str, metric: Metric) -> list[tuple[Entry, float, Value]]:
        """Return the points of a series with their places, in the order of the axis; a shared point is part of every line."""
        shared = self.study.plot.in_every_line
        found = []
        for entry in self.entries:
            value, x = entry.value(metric), entry.number(self.study.plot.x)
            if entry.series in (series, shared) and value is not None and x is not None:
                found.append((entry, x, value))
        return sorted(found, key=lambda one: one[1])

    def find(self, label: str, series: str | None = None) -> Entry | None:
        """Return the point of that name."""
        return next((one for one in self.entries if one.label == label and series in (None, one.series)), None)


def metric_name(metric: Metric, rows: Sequence[Row]) -> str:
    """Return what an axis says: `5-shot accuracy on the target`."""
    shots = next((row.shots for row in rows if row.shots), None)
    return METRICS[metric].replace("few-shot", f"{shots}-shot") if shots else METRICS[metric]
