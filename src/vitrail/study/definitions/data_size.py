"""Fig. 3 and 4: how much pre-training data a ViT needs, compared with a hybrid and a ResNet.

vitrail study data-size --budget 2
"""

from __future__ import annotations

from vitrail.study.definition import Agreement, Finding, Outcome, Plot, Point, Study
from vitrail.study.judge import NOT_MEASURED, caution, difference, noise, noise_text, percent, reasons, written
from vitrail.study.ladders import FAMILIES, Ladder
from vitrail.study.summary import Summary

_FRACTIONS = {0.1: 0, 0.25: 1, 0.5: 2, 1.0: 0}
"""Parts of the pre-training set, each with its priority."""


def points(ladder: Ladder) -> list[Point]:
    return [
        Point(
            series=family,
            label=percent(fraction),
            x=fraction,
            pretrain={**ladder.model(family), "data.fraction": fraction},
            priority=priority + (1 if priority and family == "hybrid" else 0),
        )
        for family in FAMILIES
        for fraction, priority in _FRACTIONS.items()
    ]


def _verdict(small: tuple[float, bool], large: tuple[float, bool], closing_noise: float) -> tuple[Agreement, str]:
    """Judge BiT − ViT on the smallest part and on all data, each in points and whether that is clear."""
    (at_least, leads), (at_most, differs) = small, large
    if not leads:
        if not differs:
            return "unclear", ""
        return ("no", "ViT does not overtake") if at_most > 0 else ("partly", "level on the smallest part")
    if at_least < 0:
        return "no", "ViT leads on the smallest part already"
    if at_most < 0 and differs:
        return "yes", ""
    if at_least - at_most <= closing_noise:
        return ("no", "the gap does not clearly close") if differs else ("unclear", noise_text(closing_noise))
    if differs:
        return "partly", "the gap closes with more data, ViT does not overtake at this size"
    return "partly", "level with all data"


def judge(summary: Summary) -> Outcome:
    for metric in summary.metrics:
        lines = {one: summary.line(one, metric) for one in ("ViT", "BiT")}
        shared = sorted({x for _, x, _ in lines["ViT"]} & {x for _, x, _ in lines["BiT"]})
        if len(shared) < 2:
            continue
        at = {one: {x: value for _, x, value in line} for one, line in lines.items()}
        least, most = shared[0], shared[-1]
        small, large = (difference(at["BiT"][x], at["ViT"][x]) for x in (least, most))
        ours = f"BiT − ViT: {written(small[0])} at {percent(least)} of the data, {written(large[0])} at {percent(most)}"
        values = [at[one][x] for one in ("BiT", "ViT") for x in (least, most)]
        agrees, why = _verdict(small, large, noise(*((1, value) for value in values)))
        return Outcome(ours, agrees, reasons(why, caution(values)))
    return NOT_MEASURED


STUDY = Study(
    name="data-size",
    title="Size of the pre-training set",
    mirrors="Fig. 3 and 4",
    about="ViT, hybrid and BiT are pre-trained on parts of the pre-training set with the same number of steps and the same "
    "settings, then transferred.",
    points=points,
    plot=Plot(kind="lines", x_label="part of the pre-training set", x_log=True, x_percent=True),
    findings=(
        Finding(
            number=2,
            claim="On little data ResNets win; ViT overtakes as data grows",
            where="Fig. 3, 4",
            paper="9M images of JFT: ViT-B/32 well below R50x1; above it from 90M on",
            judge=judge,
        ),
    ),
)
