"""Fig. 8: depth, width, MLP and patch size of a ViT scaled one at a time.

vitrail study shape --budget 10
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitrail.study.definition import Finding, Metric, Outcome, Plot, Point, Study
from vitrail.study.judge import NOT_MEASURED, caution, noise, noise_text, reasons
from vitrail.study.ladders import Ladder, with_model
from vitrail.study.summary import Entry, Summary, Value

_BASE = "base"
_SCALED = {"depth": ("depth",), "width": ("width", "heads"), "MLP": ("mlp",), "patch size": ("patch",)}
"""Heads grow with the width, so that each keeps its number of channels."""
_FACTORS = {0.5: "×½", 2.0: "×2", 4.0: "×4"}


def points(ladder: Ladder) -> list[Point]:
    base, shape = ladder.model(), ladder.shape()
    found = [Point(series=_BASE, label="×1", pretrain=base)]
    for series, names in _SCALED.items():
        costlier = 0.5 if series == "patch size" else 2.0  # what costs more is compared; the rest shows the trend
        for factor, label in _FACTORS.items():
            if factor == 4.0 and series != "MLP":
                continue  # four times the rest would cost more than all other points together
            fields = {name: max(1, round(factor * shape[name])) for name in names}
            pretrain = with_model(base, **fields)
            found.append(Point(series=series, label=label, pretrain=pretrain, priority=0 if factor == costlier else 1))
    return found


@dataclass(frozen=True)
class _Gain:
    """What scaling one dimension brings, from the base to the largest model."""

    value: Value
    base: Value
    doublings: float
    """Of compute."""

    @property
    def points(self) -> float:
        """Per doubling of compute."""
        return 100 * (self.value.mean - self.base.mean) / self.doublings

    def clear(self) -> int:
        """Return 1 or −1 if the gain is clearly above or below 0, else 0."""
        return _sign(self.points, noise((1 / self.doublings, self.value), (1 / self.doublings, self.base)))

    def lead(self, other: _Gain) -> tuple[int, float]:
        """Return 1 or −1 if this gain is clearly larger or smaller than another, else 0; and the noise of the difference."""
        shared = 1 / self.doublings - 1 / other.doublings
        points = noise((1 / self.doublings, self.value), (1 / other.doublings, other.value), (shared, self.base))
        return _sign(self.points - other.points, points), points


def _sign(points: float, least: float) -> int:
    return 0 if abs(points) <= least else 1 if points > 0 else -1


def _gains(summary: Summary, base: Entry, metric: Metric) -> dict[str, _Gain]:
    """Return the gains from the base upwards."""
    start, found = base.value(metric), {}
    for series in _SCALED if start is not None else ():
        assert start is not None
        larger = [(x, value) for entry, x, value in summary.line(series, metric) if x > (base.first.forward_flops or 0)]
        if larger:
            x, value = larger[-1]
            found[series] = _Gain(value, start, math.log2(x / (base.first.forward_flops or x)))
    return found


def judge(summary: Summary) -> Outcome:
    """Compare the gain per doubling of compute."""
    base = summary.find("×1", _BASE)
    for metric in summary.metrics if base is not None else ():
        assert base is not None
        gains = _gains(summary, base, metric)
        if not {"depth", "width", "patch size"} <= gains.keys():
            continue
        depth, width, patch, mlp = (gains.get(name) for name in ("depth", "width", "patch size", "MLP"))
        assert depth and width and patch
        ours = ", ".join(f"{name} {gain.points:+.1f}".replace("-", "−") for name, gain in gains.items())
        ours = f"points per doubling of compute: {ours}"
        why = caution([gain.value for gain in gains.values()])
        lead, points = depth.lead(width)
        if lead < 0 or patch.clear() < 0:
            return Outcome(ours, "no", why)
        if lead == 0 or patch.clear() == 0:
            return Outcome(ours, "unclear", noise_text(points) if lead == 0 else "smaller patches do not clearly help")
        if mlp and (mlp.lead(depth)[0] > 0 or mlp.lead(width)[0] < 0):
            return Outcome(ours, "partly", reasons("the MLP helps more than depth or less than width", why))
        return Outcome(ours, "yes", why)
    return NOT_MEASURED


STUDY = Study(
    name="shape",
    title="Shape of the model",
    mirrors="Fig. 8",
    about="One dimension of a ViT is scaled at a time; accuracy after transfer against the FLOPs of one image. Smaller patches "
    "cost more, so their line runs to the right.",
    points=points,
    plot=Plot(kind="lines", x="forward_flops", x_label="FLOPs per image, forward", x_log=True, in_every_line=_BASE),
    findings=(
        Finding(
            number=4,
            claim="Depth helps most, width least; smaller patches help robustly",
            where="Fig. 8",
            paper="gains from depth up to 64 layers, diminishing from 16 on",
            judge=judge,
        ),
    ),
)
