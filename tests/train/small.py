"""Runs small enough to be taken many times."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from vitrail.data.augment.spec import Augment
from vitrail.train import loop
from vitrail.train.callbacks import Callback
from vitrail.train.config import DataSpec, ModelSpec, OptimSpec, Recipe, ScheduleSpec
from vitrail.train.result import Result

MODEL = ModelSpec(name="ViT-Ti/4", image_size=8, channels=1, width=32, depth=2, heads=1, mlp=48, dropout=0.1, stochastic_depth=0.1)


def small(**changes: Any) -> Recipe:
    """Six steps on the digits, with everything random that training can have."""
    settings: dict[str, Any] = {
        "name": "small",
        "model": MODEL,
        "data": DataSpec(source="digits", workers=0, holdout=0.02),
        "augment": Augment(crop_area=(0.7, 1.0), flip=0.0, mixup=0.2, smoothing=0.1),
        "optim": OptimSpec(lr=2e-3, weight_decay=0.1),
        "schedule": ScheduleSpec(warmup=2),
        "steps": 6,
        "batch": 32,
        "ema": 0.9,
        "eval_every": 0,
        "checkpoint_every": 2,
        "log_every": 2,
    }
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        settings[outer] = dataclasses.replace(settings[outer], **{inner: value}) if inner else value
    return Recipe(**settings)


def train(*args: Any, **kwargs: Any) -> Result:
    """Train without drawing the curves at the end, which takes longer than the rest of a small run: `curves=True` draws them."""
    return loop.train(*args, **{"curves": False, **kwargs})


class Recorder(Callback):
    """Keeps messages and records."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.records: list[dict[str, Any]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def trained(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The weights a run ended with."""
    from safetensors.torch import load_file

    return load_file(out / "model" / "model.safetensors")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def losses(out: Path) -> list[tuple[Any, ...]]:
    """The part of the log that must not depend on the machine's mood."""
    from vitrail.train.run import RunFolder

    records = RunFolder(out).records()
    return [(one["step"], one["loss"], one["lr"], one["grad_norm"]) for one in records if one["kind"] == "train"]
