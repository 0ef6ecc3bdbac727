"""Compare results with what the paper found: differences in points, against their own uncertainty."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from vitrail.study.definition import Agreement, Metric, Outcome
from vitrail.study.summary import Entry, Summary, Value

NOT_MEASURED = Outcome("not measured", "unclear")
_USUAL_GAP = 0.05
"""Deviation over seeds of differences of similarities and of attention distances; in the studies of docs/results .00 to .07."""


def difference(one: Value, two: Value) -> tuple[float, bool]:
    """Return one − two in points of accuracy, and whether it is more than two standard errors from 0."""
    points = 100 * (one.mean - two.mean)
    return points, abs(points) > noise((1, one), (1, two))


def noise(*terms: tuple[float, Value]) -> float:
    """Return two standard errors, in points, of a sum of values with these factors."""
    return 200 * math.hypot(*(factor * value.error for factor, value in terms))


def gap(summary: Summary, entry: Entry, one: str, two: str) -> tuple[float, float] | None:
    """Return the mean of one column minus another over a point's seeds, and two standard errors of it; None if not measured.

    As with accuracies, a deviation counts as at least the median over all points; `_USUAL_GAP` if all have one seed.
    """
    gaps = entry.gaps(one, two)
    if not gaps:
        return None
    stds = [statistics.stdev(found) for each in summary.entries if len(found := each.gaps(one, two)) > 1]
    usual = statistics.median([std for std in stds if std > 0] or [_USUAL_GAP])  # fixed tables have none
    std = max(usual, statistics.stdev(gaps)) if len(gaps) > 1 else usual
    return statistics.fmean(gaps), 2 * std / math.sqrt(len(gaps))


def noise_text(points: float) -> str:
    return f"differences up to {points:.1f} points are noise"


def written(points: float) -> str:
    return f"{points:+.1f} points".replace("-", "−")


def percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def caution(values: Sequence[Value]) -> str:
    """Say what weakens a comparison."""
    single = [one for one in values if one.std is None]
    if any(one.usual_std is None for one in single):
        return "one seed: differences between seeds are not known"
    if single:
        return "some points have one seed: their seeds are taken to differ as those of the others do"
    return ""


def reasons(*parts: str) -> str:
    """Join what there is to say about a verdict; empty parts are left out."""
    return "; ".join(filter(None, parts))


def best(summary: Summary, series: str, metric: Metric, *, lowest: bool = False) -> tuple[str, Value] | None:
    """Return the best (or the weakest) point of a series, with its label."""
    points = [(entry.label, value) for entry in summary.entries if entry.series == series and (value := entry.value(metric))]
    pick = min if lowest else max
    return pick(points, key=lambda one: one[1].mean) if points else None


def interpolated(line: Sequence[tuple[float, float]], x: float) -> float:
    """Return the height of a line (x, y), ascending in x, at a point within it; the axis is logarithmic."""
    for (left, low), (right, high) in itertools.pairwise(line):
        if left <= x <= right:
            part = 0.0 if left == right else math.log(x / left) / math.log(right / left)
            return low + part * (high - low)
    return line[0][1] if x < line[0][0] else line[-1][1]


def frontier(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the best height reached up to each x."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(line):
        found.append((x, max(y, found[-1][1] if found else y)))
    return found


def cost_to_reach(line: Sequence[tuple[float, float]], height: float) -> float | None:
    """Return the least x at which the frontier of a line reaches a height, interpolated; None if it never does."""
    points = frontier(line)
    if not points or points[-1][1] < height:
        return None
    if points[0][1] >= height:
        return points[0][0]
    for (left, low), (right, high) in itertools.pairwise(points):
        if low < height <= high:
            return math.exp(math.log(left) + (height - low) / (high - low) * math.log(right / left))
    return None


def agreement(*parts: tuple[float, bool]) -> Agreement:
    """Combine differences that should all be positive: yes if all clearly are, no if one clearly is not, unclear otherwise."""
    if any(points < 0 and clear for points, clear in parts):
        return "no"
    return "yes" if all(points > 0 and clear for points, clear in parts) else "unclear"
