"""Records of a run in words."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from vitrail.tasks.base import metric_text
from vitrail.train.callbacks import Record, RunInfo

_SHORT = ("accuracy", "map", "mae", "patch_accuracy", "loss")  # metrics of the raw weights that are shown


def shown(record: Record) -> dict[str, str]:
    """Format the metrics of a training record."""
    speed = record["speed"]
    texts = {
        "epoch": f"{record['epoch']:.2f}",
        "loss": f"{record['loss']:.4f}",
        "of constant": f"{record['relative_loss']:.1%}" if "relative_loss" in record else "",
        "lr": f"{record['lr']:.3g}",
        "grad norm": f"{record['grad_norm']:.3g}",
        "images/s": f"{speed['images_per_second']:,.0f}",
        "MFU": f"{speed['mfu']:.1%}" if speed["mfu"] is not None else "",
        "data wait": f"{speed['data_wait']:.0%}",
        "memory": f"{speed['memory'] / 2**30:.2f} GiB" if speed["memory"] else "",
        "skipped": str(record["skipped"]) if record["skipped"] else "",
    }
    return {name: value for name, value in texts.items() if value}


def validation_text(record: dict[str, Any]) -> str:
    """Format the metrics of a validation."""
    parts = []
    if "relative_loss" in record:
        known = f"{record['constant_loss']:.4g}; targets of {record['target_entropy']:.2f} bits"
        parts.append(f"loss {record['relative_loss']:.1%} of the best constant prediction's {known}")
    parts += _metric_texts(record)
    parts += [f"{name.replace('shot', '-shot')} {value:.2%}" for name, value in record.items() if name.endswith("shot")]
    raw = _metric_texts({name: record[f"raw_{name}"] for name in _SHORT if f"raw_{name}" in record})
    text = ", ".join(parts) + (f"; raw weights: {', '.join(raw)}" if raw else "")
    if "best" in record:
        text += f"; best {record['best'].replace('_', ' ')} so far"
    if "attention_entropy" in record:
        entropies = f"{record['attention_entropy']:.2f} of {record['attention_uniform_entropy']:.2f}"
        text += f"; attention entropy {entropies}, score std {record['attention_score_std']:.2f}"
    return text


def _metric_texts(record: dict[str, Any]) -> list[str]:
    order = ("accuracy", "top5_accuracy", "balanced_accuracy", "map", "f1", "mae", "r2", "patch_accuracy", "loss")
    return [f"{name.replace('_', ' ')} {metric_text(name, record[name])}" for name in order if name in record]


def remaining(record: Record, info: RunInfo) -> str:
    """Return how long the steps that are left will take at this speed."""
    rate = record["speed"]["images_per_second"]
    batch = info.config["batch"]
    seconds = (info.steps - record["step"]) * batch / rate if rate else 0
    return str(timedelta(seconds=round(seconds)))
