"""Rows of a study with accuracies that a test chooses, as if they had been trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrail.models import flops
from vitrail.study.definitions import STUDIES
from vitrail.study.plan import Plan, PlannedRow, full_plan
from vitrail.study.rows import DONE, Row
from vitrail.study.settings import StudySettings
from vitrail.train.plan import config_of

Accuracy = Callable[[PlannedRow], float]


def plan_of(name: str, out: Path = Path("unused"), **settings: Any) -> Plan:
    return full_plan(STUDIES[name], StudySettings(out=out, device="cpu", **settings))


def made_rows(name: str, accuracy: Accuracy, *, seeds: int = 3, **values: Any) -> list[Row]:
    """Return finished rows; seeds differ by a tenth of a point."""
    rows = []
    for planned in plan_of(name, seeds=seeds).rows():
        reached = accuracy(planned) + 0.001 * (planned.seed - 1)
        recipe = planned.pretrain or planned.finetune
        assert recipe is not None and recipe.steps is not None
        forward = float(flops(config_of(recipe.model, 5)))
        facts: dict[str, Any] = {
            "few_shot": reached if planned.pretrain is not None else None,
            "finetuned": reached,
            "shots": 5,
            "test_images": 10_000,
            "model": recipe.model.name,
            "image_size": 16,
            "forward_flops": forward,
            "pretrain_flops": 3 * forward * recipe.steps * recipe.batch if planned.pretrain is not None else None,
            "pretrain_epochs": 10.0,
            "finetune_size": planned.finetune.model.image_size or 16 if planned.finetune else None,
            "seconds": 12.0,
            "hardware": "a machine",
            "torch": "2.0",
        }
        rows.append(planned.row(StudySettings(seeds=seeds), status=DONE, **{**facts, **values}))
    return rows
