"""The learning rate as a function of the step, as the reference computes it."""

from __future__ import annotations

import dataclasses
import math

from vitrail.errors import VitrailError
from vitrail.train.config import ScheduleSpec
from vitrail.train.lengths import describe_length, length_in_steps


def in_steps(spec: ScheduleSpec, total: int, per_epoch: float) -> ScheduleSpec:
    """Return a schedule with its lengths in steps; one whose warm-up never ends is refused.

    A single step is allowed, to try things out.
    """
    resolved = dataclasses.replace(
        spec,
        warmup=length_in_steps(spec.warmup, total, per_epoch),
        cooldown=length_in_steps(spec.cooldown, total, per_epoch),
    )
    check_schedule(resolved, total, written=describe_length(spec.warmup))
    return resolved


def check_schedule(spec: ScheduleSpec, total: int, written: str = "") -> None:
    """Refuse a warm-up, in steps, that never ends. `written` is how the recipe gives it."""
    if total > 1 and _steps(spec.warmup) >= total:
        compared = "as long as" if spec.warmup == total else "longer than"
        raise VitrailError(
            f"The warm-up of {written or f'{spec.warmup} steps'} is {compared} the whole run of {total} steps. "
            f"Train longer, or set --schedule.warmup to {total // 10} or 10%."
        )


def factor(spec: ScheduleSpec, step: int, total: int, peak: float) -> float:
    """Return the schedule s(t), with lengths in steps, at a step, counted from 0: the learning rate is s·peak.

    The warm-up multiplies the decay, and its first step has a learning rate of 0, as in the reference.
    """
    warmup, cooldown = _steps(spec.warmup), _steps(spec.cooldown)
    progress = min(max((step - warmup) / max(total - warmup, 1), 0.0), 1.0)
    end = spec.end / peak
    if spec.kind == "linear":
        value = end + (1 - end) * (1 - progress)
    elif spec.kind == "cosine":
        value = end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))
    elif spec.kind == "rsqrt":
        value = 1 / math.sqrt(1 + max(step - warmup, 0) / spec.timescale)
    else:
        value = 1.0
    if warmup:
        value *= min(1.0, step / warmup)
    if cooldown:
        value *= min(1.0, (total - step) / cooldown)
    return value


def describe_schedule(spec: ScheduleSpec, over: str, resolved: ScheduleSpec | None = None) -> str:
    """Describe a schedule in one line. `over` is the length of the run; `resolved` the same schedule in steps, if known."""
    parts = [f"{spec.kind} over {over}"]
    for name, setting in (("warm-up", "warmup"), ("cool-down", "cooldown")):
        length = getattr(spec, setting)
        if length:
            steps = f" = {describe_length(getattr(resolved, setting))}" if resolved is not None and isinstance(length, str) else ""
            parts.append(f"{name} {describe_length(length)}{steps}")
    return ", ".join(parts)


def _steps(length: int | str) -> int:
    if isinstance(length, str):
        raise TypeError(f"{length!r} is not in steps: call in_steps first")
    return length
