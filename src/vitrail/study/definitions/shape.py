"""Fig. 8: depth, width, MLP and patch size of a ViT scaled one at a time.

vitrail study shape --budget 10
"""

from __future__ import annotations

import math

from vitrail.study.definition import Finding, Outcome, Plot, Point, Study
from vitrail.study.judge import NOT_MEASURED, caution
from vitrail.study.ladders import Ladder, with_model
from vitrail.study.summary import Summary

_BASE = "base"
_SCALED = {"depth": ("depth",), "width": ("width", "heads"), "MLP": ("mlp",), "patch size": ("patch",)}
"""Heads grow with the width, so that each keeps its number of channels."""
_FACTORS = {0.5: "×½", 2.0: "×2", 4.0: "×4"}


def points(ladder: Ladder) -> list[Point]:
    base, shape = ladder.model(), ladder.shape()
    found = [Point(series=_BASE, label="×1", pretrain=base)]
    for series, names in _SCALED.items():
        dearer = 0.5 if series == "patch size" else 2.0  # what costs more is compared; the rest shows the trend
        for factor, label in _FACTORS.items():
            if factor == 4.0 and series != "MLP":
                continue  # four times the rest would cost more than all other points together
            fields = {name: max(1, round(factor * shape[name])) for name in names}
            pretrain = with_model(base, **fields)
            found.append(Point(series=series, label=label, pretrain=pretrain, priority=0 if factor == dearer else 1))
    return found


def judge(summary: Summary) -> Outcome:
    """Compare the gain per doubling of compute, from the base upwards."""
    base = summary.find("×1", _BASE)
    for metric in summary.metrics:
        start = base.value(metric) if base else None
        if base is None or start is None:
            continue
        gains, values = {}, [start]
        for series in _SCALED:
            larger = [(x, value) for entry, x, value in summary.line(series, metric) if x > (base.first.forward_flops or 0)]
            if larger:
                x, value = larger[-1]
                gains[series] = 100 * (value.mean - start.mean) / math.log2(x / (base.first.forward_flops or x))
                values.append(value)
        if not {"depth", "width", "patch size"} <= gains.keys():
            continue
        ours = "points per doubling of compute: " + ", ".join(f"{name} {gain:+.1f}" for name, gain in gains.items())
        noise = 200 * max(value.error for value in values)
        if gains["depth"] - gains["width"] > noise and gains["patch size"] > noise:
            return Outcome(ours, "yes", caution(values))
        if gains["width"] - gains["depth"] > noise or gains["patch size"] < -noise:
            return Outcome(ours, "no", caution(values))
        return Outcome(ours, "unclear", f"differences up to {noise:.1f} points are noise")
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
