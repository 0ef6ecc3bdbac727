"""Fig. 9: class token or mean over patches, each at several learning rates; and attention pooling.

vitrail study pooling --budget 5
"""

from __future__ import annotations

from vitrail.study.definition import Finding, Outcome, Plot, Point, Study
from vitrail.study.judge import NOT_MEASURED, best, caution, difference, noise, noise_text, reasons, written
from vitrail.study.ladders import Ladder, with_model
from vitrail.study.summary import Summary

_POOLINGS = {"class": "class token", "mean": "mean over patches", "map": "attention pooling"}
_FACTORS = {1 / 3: 1, 1.0: 0, 3.0: 0}
"""Learning rates relative to the usual one, each with its priority."""
_EQUAL = 2.0
"""Points that two poolings may differ by, with two standard errors, and still count as equal."""


def points(ladder: Ladder) -> list[Point]:
    usual = ladder.pretrain().optim.lr
    return [
        Point(
            series=name,
            label=f"lr {factor * usual:.1e}",
            x=factor * usual,
            pretrain=with_model(ladder.model(), pooling=pooling) | {"optim.lr": factor * usual},
            priority=priority + (2 if pooling == "map" else 0),
        )
        for pooling, name in _POOLINGS.items()
        for factor, priority in _FACTORS.items()
    ]


def judge(summary: Summary) -> Outcome:
    for metric in summary.metrics:
        token, mean = (best(summary, _POOLINGS[one], metric) for one in ("class", "mean"))
        if token is None or mean is None:
            continue
        points, clear = difference(mean[1], token[1])
        least = noise((1, mean[1]), (1, token[1]))
        ours = f"at its best learning rate each: class token {token[1].text()}, mean {mean[1].text()}"
        gap = f"mean − token: {written(points)}"
        if clear and abs(points) >= 1:
            return Outcome(ours, "no", f"{gap}, more than noise")
        if abs(points) + least > _EQUAL:  # that no difference is seen does not make them equal
            return Outcome(ours, "unclear", reasons(gap, noise_text(least), caution([token[1]])))
        same = "both are best at the same learning rate" if mean[0] == token[0] else ""
        return Outcome(ours, "partly" if same else "yes", reasons(gap, same, caution([token[1]])))
    return NOT_MEASURED


STUDY = Study(
    name="pooling",
    title="Pooling and its learning rate",
    mirrors="Fig. 9 (App. D.3)",
    about="The class token, the mean over patches and attention pooling, which is not in the paper, each at several learning "
    "rates of pre-training.",
    points=points,
    plot=Plot(kind="lines", x_label="learning rate of pre-training", x_log=True),
    findings=(
        Finding(
            claim="Class token and mean pooling work equally well, but need different learning rates",
            where="App. D.3, Fig. 9",
            paper="the first attempt with mean pooling failed because of its learning rate",
            judge=judge,
        ),
    ),
)
