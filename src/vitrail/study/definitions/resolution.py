"""§3.2: fine-tuning at a higher resolution than pre-training, with the same patch size and resampled positions.

vitrail study resolution --budget 5
"""

from __future__ import annotations

from vitrail.study.definition import Finding, Outcome, Plot, Point, Study
from vitrail.study.judge import NOT_MEASURED, agreement, caution, difference, reasons, written
from vitrail.study.ladders import FAMILIES, Ladder
from vitrail.study.summary import Summary

_FACTORS = {1.0: 0, 1.5: 1, 2.0: 0}


def points(ladder: Ladder) -> list[Point]:
    sizes = {round(factor * ladder.image_size / ladder.stride) * ladder.stride: priority for factor, priority in _FACTORS.items()}
    return [
        Point(
            series=family,
            label=f"{size} px",
            x=size,
            pretrain=ladder.model(family),
            finetune={"model.image_size": size},
            priority=priority + {"ViT": 0, "BiT": 1, "hybrid": 2}[family],
        )
        for family in FAMILIES
        for size, priority in sizes.items()
    ]


def judge(summary: Summary) -> Outcome:
    line = summary.line("ViT", "finetuned")
    if len(line) < 2:
        return NOT_MEASURED
    (low, _, first), (high, _, last) = line[0], line[-1]
    gain = difference(last, first)
    ours = f"ViT fine-tuned at {low.label} {first.text()}, at {high.label} {last.text()}: {written(gain[0])}"
    return Outcome(ours, agreement(gain), reasons(_detail(summary, high.first.finetune_size), caution([first, last])))


def _detail(summary: Summary, size: int | None) -> str:
    pixels = next((row.target_pixels for row in summary.rows if row.target_pixels), None)
    return f"the target's images have {pixels} pixels, so {size} only enlarges them" if pixels and size and pixels < size else ""


STUDY = Study(
    name="resolution",
    title="Resolution of fine-tuning",
    mirrors="§3.2",
    about="One pre-trained model of each family, fine-tuned at one, one and a half and two times the resolution of pre-training.",
    points=points,
    plot=Plot(kind="lines", metrics=("finetuned",), x_label="resolution of fine-tuning in pixels"),
    few_shot=False,
    findings=(
        Finding(
            claim="Fine-tuning at a higher resolution than pre-training helps",
            where="§3.2",
            paper="used for all results; no comparison is given",
            judge=judge,
        ),
    ),
)
