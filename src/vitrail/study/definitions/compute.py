"""Fig. 5: accuracy after transfer against the compute of pre-training, for sizes of ViT, hybrid and BiT.

vitrail study compute --budget 10
"""

from __future__ import annotations

import math

from vitrail.study.definition import Finding, Outcome, Plot, Point, Study
from vitrail.study.judge import (
    NOT_MEASURED,
    caution,
    cost_to_reach,
    frontier,
    interpolated,
    noise,
    noise_text,
    percent,
    reasons,
    written,
)
from vitrail.study.ladders import FAMILIES, RUNGS, Ladder
from vitrail.study.summary import Summary

_LENGTHS = {1.0: 0, 0.5: 1, 0.25: 2}
"""Lengths of pre-training, each with its priority."""
_SIZES = ("small", "medium", "large")


def points(ladder: Ladder) -> list[Point]:
    return [
        Point(
            series=family,
            label=f"{_SIZES[rung]}{'' if length == 1 else f', {length:g} × the steps'}",
            pretrain=ladder.model(family, rung),
            length=length,
            priority=priority,
        )
        for family in FAMILIES
        for rung in range(RUNGS)
        for length, priority in _LENGTHS.items()
    ]


def _line(summary: Summary, family: str) -> list[tuple[float, float]]:
    metric = summary.metrics[0]
    return frontier([(x, value.mean) for _, x, value in summary.line(family, metric)])


def _noise(summary: Summary, *families: str) -> float:
    """Return two standard errors of a difference between families, in points, where each is least certain."""
    lines = [[value for _, _, value in summary.line(one, summary.metrics[0])] for one in families]
    return noise(*((1, max(values, key=lambda one: one.error)) for values in lines))


def _caution(summary: Summary, *families: str) -> str:
    return caution([value for one in families for _, _, value in summary.line(one, summary.metrics[0])])


def _times_as_much(vit: list[tuple[float, float]], bit: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the height that both reach, and BiT's compute for it relative to ViT's."""
    height = min(vit[-1][1], bit[-1][1])
    needed = [cost_to_reach(line, height) for line in (vit, bit)]
    assert needed[0] and needed[1]
    return height, needed[1] / needed[0]


def judge_resnets(summary: Summary) -> Outcome:
    if not summary.metrics or any(len(_line(summary, one)) < 2 for one in ("ViT", "BiT")):
        return NOT_MEASURED
    vit, bit = _line(summary, "ViT"), _line(summary, "BiT")
    height, ratio = _times_as_much(vit, bit)
    times = f"{ratio:.1f} times as many FLOPs as" if ratio >= 1 else f"{1 / ratio:.1f} times fewer FLOPs than"
    if (vit if ratio >= 1 else bit)[0][1] >= height:  # at its cheapest point, so that less might do
        times = f"at least {times}"
    ours = f"to reach {percent(height)}, BiT needs {times} ViT"
    points = _noise(summary, "ViT", "BiT")
    shift = points / 100 if ratio >= 1 else -points / 100  # against the verdict
    shifted = [(x, y + shift) for x, y in bit]
    reached, doubted = _times_as_much(vit, shifted)
    if (doubted > 1) != (ratio >= 1):
        return Outcome(ours, "unclear", noise_text(points))
    costlier, line = ("BiT", shifted) if ratio >= 1 else ("ViT", vit)
    if line[0][1] >= reached:  # what it costs at least is then not known
        return Outcome(ours, "unclear", f"the cheapest {costlier} reaches as much, within {points:.1f} points")
    seeds = _caution(summary, "ViT", "BiT")
    if ratio < 1:
        return Outcome(ours, "no", reasons("the pre-training set is small, where the paper too finds ResNets ahead", seeds))
    return Outcome(ours, "yes", seeds) if ratio >= 2 else Outcome(ours, "partly", reasons("less than twice as many", seeds))


def judge_hybrids(summary: Summary) -> Outcome:
    if not summary.metrics or any(len(_line(summary, one)) < 2 for one in ("ViT", "hybrid")):
        return NOT_MEASURED
    vit, hybrid = _line(summary, "ViT"), _line(summary, "hybrid")
    low, high = max(vit[0][0], hybrid[0][0]), min(vit[-1][0], hybrid[-1][0])
    small, large = (100 * (interpolated(hybrid, x) - interpolated(vit, x)) for x in (low, high))
    ours = f"hybrid − ViT at equal compute: {written(small)} at {low:.1e} FLOPs, {written(large)} at {high:.1e}"
    points = _noise(summary, "ViT", "hybrid")
    if abs(small) <= points:
        return Outcome(ours, "unclear", noise_text(points))
    seeds = _caution(summary, "ViT", "hybrid")
    if small < 0:
        return Outcome(ours, "no", reasons("the hybrid does not lead at small compute", seeds))
    closing, least = small - large, math.sqrt(2) * points  # a difference of two differences
    level = abs(large) <= max(points, 1.0)
    if closing <= least and level:  # that no lead is seen at large compute does not mean that it vanished
        return Outcome(ours, "unclear", noise_text(least))
    if closing <= least:
        return Outcome(ours, "no", reasons("the lead grows" if closing < -least else "the gap does not clearly close", seeds))
    if level:
        return Outcome(ours, "yes", seeds)
    return Outcome(
        ours, "partly", reasons("ViT leads at large compute" if large < 0 else "the gap closes, but is not closed", seeds)
    )


STUDY = Study(
    name="compute",
    title="Compute of pre-training",
    mirrors="Fig. 5",
    about="Three sizes of each family, each pre-trained for up to three lengths; accuracy after transfer against the FLOPs "
    "of the whole pre-training.",
    points=points,
    plot=Plot(kind="lines", x="pretrain_flops", x_label="FLOPs of pre-training", x_log=True),
    findings=(
        Finding(
            number=1,
            claim="Pre-trained on enough data, ViT beats ResNets at 2–4× less pre-training compute",
            where="Table 2, Fig. 5",
            paper="ViT-L/16 (JFT) 87.76 % on ImageNet for 0.68k TPUv3-core-days, BiT-L 87.54 % for 9.9k",
            judge=judge_resnets,
        ),
        Finding(
            number=3,
            claim="Hybrids are slightly better than ViT at small compute, equal at large",
            where="Fig. 5",
            paper="the gap vanishes for the larger models",
            judge=judge_hybrids,
        ),
    ),
)
