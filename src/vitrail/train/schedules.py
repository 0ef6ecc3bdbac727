"""The learning rate as a function of the step, as the reference computes it."""

from __future__ import annotations

import math

from vitrail.errors import VitrailError
from vitrail.train.config import ScheduleSpec


def check_schedule(spec: ScheduleSpec, total: int) -> None:
    """Refuse a warm-up that never ends; a single step is allowed, to try things out."""
    if total > 1 and spec.warmup >= total:
        raise VitrailError(
            f"The warm-up of {spec.warmup} steps is as long as the whole run of {total}. "
            f"Train longer, or set --schedule.warmup to {total // 10}."
        )


def factor(spec: ScheduleSpec, step: int, total: int, peak: float) -> float:
    """Return the schedule s(t) at a step, counted from 0: the learning rate is s·peak.

    The warm-up multiplies the decay, and its first step has a learning rate of 0, as in the reference.
    """
    progress = min(max((step - spec.warmup) / max(total - spec.warmup, 1), 0.0), 1.0)
    end = spec.end / peak
    if spec.kind == "linear":
        value = end + (1 - end) * (1 - progress)
    elif spec.kind == "cosine":
        value = end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))
    elif spec.kind == "rsqrt":
        value = 1 / math.sqrt(1 + max(step - spec.warmup, 0) / spec.timescale)
    else:
        value = 1.0
    if spec.warmup:
        value *= min(1.0, step / spec.warmup)
    if spec.cooldown:
        value *= min(1.0, (total - step) / spec.cooldown)
    return value
