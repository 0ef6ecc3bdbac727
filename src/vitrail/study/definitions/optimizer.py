"""Table 7: Adam or SGD for pre-training a ResNet; and a ViT, which is not in the table.

vitrail study optimizer --budget 5
"""

from __future__ import annotations

from vitrail.study.definition import Finding, Outcome, Plot, Point, Study
from vitrail.study.judge import NOT_MEASURED, agreement, caution, difference, written
from vitrail.study.ladders import Family, Ladder
from vitrail.study.summary import Summary, Value

_SGD = (0.1, 0.03)
"""Learning rates at a batch of 256."""


def points(ladder: Ladder) -> list[Point]:
    families: tuple[Family, ...] = ("BiT", "ViT")
    found = []
    for family in families:
        later = 1 if family == "ViT" else 0
        found.append(Point(series=family, label="Adam", pretrain=ladder.model(family), priority=later))
        for lr in _SGD:
            rate = lr * ladder.batch / 256
            sgd = {"optim.name": "sgd", "optim.momentum": 0.9, "optim.lr": rate, "optim.weight_decay": 1e-4 / lr}
            label = f"SGD, lr {rate:.3g}"
            found.append(
                Point(series=family, label=label, pretrain={**ladder.model(family), **sgd}, priority=later + (lr != _SGD[0]))
            )
    return found


def judge(summary: Summary) -> Outcome:
    for metric in summary.metrics:
        values = {entry.label: value for entry in summary.entries if entry.series == "BiT" and (value := entry.value(metric))}
        adam = values.pop("Adam", None)
        if adam is None or not values:
            continue
        sgd: Value = max(values.values(), key=lambda one: one.mean)
        gain = difference(adam, sgd)
        ours = f"BiT: Adam {adam.text()}, the best SGD {sgd.text()}: {written(gain[0])}"
        return Outcome(ours, agreement(gain), caution([adam, sgd]))
    return NOT_MEASURED


STUDY = Study(
    name="optimizer",
    title="Adam or SGD for pre-training",
    mirrors="Table 7",
    about="BiT pre-trained with AdamW, and with SGD at two learning rates; the same for a ViT. Fine-tuning is the same for all.",
    points=points,
    plot=Plot(kind="categories", metrics=("finetuned", "few_shot")),
    findings=(
        Finding(
            claim="ResNets transfer better after Adam than after SGD",
            where="Table 7",
            paper="Adam is ahead of SGD on most of five datasets",
            judge=judge,
        ),
    ),
)
