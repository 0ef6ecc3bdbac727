"""§4.6: the same fine-tuning from scratch, after masked patch prediction, after masked autoencoding, after supervised pre-training.

vitrail study self-supervision --budget 5
"""

from __future__ import annotations

from vitrail.study.definition import Finding, Outcome, Plot, Point, Study
from vitrail.study.judge import NOT_MEASURED, agreement, caution, difference, reasons, written
from vitrail.study.ladders import Ladder, with_model
from vitrail.study.summary import Summary

SCRATCH, MASKED, MAE, SUPERVISED = "from scratch", "masked patches", "masked autoencoder", "supervised"


def points(ladder: Ladder) -> list[Point]:
    # The class token learns nothing from a loss on patches, so all pool by the mean.
    model = with_model(ladder.model(), pooling="mean")
    decoder = {"task.decoder_width": {"tiny": 32, "small": 96, "paper": 512}[ladder.name], "task.decoder_depth": 2}
    starts = {
        MASKED: {**model, "task.kind": "masked-patch"},
        MAE: {**model, "task.kind": "masked-autoencoder", "optim.beta2": 0.95, **decoder},
        SUPERVISED: model,
    }
    optim = {"optim.name": "adamw", "optim.lr": ladder.pretrain().optim.lr / 2, "optim.weight_decay": 0.05}
    return [
        Point(series="ViT", label=SCRATCH, pretrain=None, finetune={**model, **optim}),
        *(
            Point(series="ViT", label=label, pretrain=changes, finetune=optim, priority=1 if label == MAE else 0)
            for label, changes in starts.items()
        ),
    ]


def judge(summary: Summary) -> Outcome:
    values = {label: entry.value("finetuned") for label in (SCRATCH, MASKED, MAE, SUPERVISED) if (entry := summary.find(label))}
    scratch, masked, supervised = (values.get(label) for label in (SCRATCH, MASKED, SUPERVISED))
    if scratch is None or masked is None or supervised is None:
        return NOT_MEASURED
    over, below = difference(masked, scratch), difference(supervised, masked)
    ours = ", ".join(f"{label} {value.text()}" for label, value in values.items() if value)
    verdict = agreement(over, below)
    why = f"{written(over[0])} over scratch, {written(-below[0])} against supervised"
    if verdict == "no" and ((over[0] > 0 and over[1]) or (below[0] > 0 and below[1])):
        verdict = "partly"
    return Outcome(ours, verdict, reasons(why, caution([scratch, masked, supervised])))


STUDY = Study(
    name="self-supervision",
    title="Self-supervised pre-training",
    mirrors="§4.6",
    about="The same ViT fine-tuned on the target from four starts. Masked autoencoding is not in the paper. All are pre-trained "
    "with the same number of images.",
    points=points,
    plot=Plot(kind="categories", metrics=("finetuned", "few_shot")),
    findings=(
        Finding(
            number=8,
            claim="Masked patch prediction helps over scratch, trails supervised",
            where="§4.6",
            paper="ViT-B/16: 79.9 % on ImageNet, 2 points above scratch, 4 below supervised",
            judge=judge,
        ),
    ),
)
