"""What a run leaves behind: the model as a checkpoint folder, and the settings it was really trained with."""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import Any

import torch

from vitrail.data.trained_on import TrainedOn, overlap, record, record_split, records_in
from vitrail.errors import counted
from vitrail.models import Model, build_model
from vitrail.models.lora import merged_state
from vitrail.tasks import Masked, Meter, Regress
from vitrail.tasks.multilabel import LabelMeter
from vitrail.train.config import ModelSpec, Recipe, ScheduleSpec
from vitrail.train.optimizers import explain
from vitrail.train.parallel import World
from vitrail.train.prepare import Prepared
from vitrail.train.pretext import save_parts
from vitrail.train.run import RunFolder
from vitrail.train.shards import whole
from vitrail.version import __version__


def export_model(
    run: RunFolder,
    folder: Path,
    recipe: Recipe,
    prepared: Prepared,
    world: World,
    metrics: dict[str, float],
    meter: Meter | None,
    checkpoint: dict[str, Any],
    described: str,
) -> None:
    """Write the weights as they are now to a checkpoint folder; `checkpoint` and `described` say which they are.

    Every rank takes part, since each may hold a shard of the weights; the main one writes.
    """
    from vitrail.checkpoints import save

    model, task = plain_copy(prepared.model), prepared.task
    if prepared.wrapper is not None and isinstance(task, Masked) and folder == run.model:
        save_parts(run.path, prepared.wrapper, task, write=world.main)
    if not world.main:
        return
    if isinstance(task, Regress):
        unstandardise(model, task)
    task_info = task.describe()
    if isinstance(meter, LabelMeter):
        task_info["thresholds"] = [rounded_threshold(one) for one in meter.thresholds()]
    provenance = {
        "recipe": recipe.name,
        "start": recipe.model.start,
        **_lora(recipe.model),
        "data": prepared.source,
        "trained_on": prepared.trained_on,
        "steps": checkpoint["step"],
        "batch": recipe.batch,
        "weights": f"{described}{f'; mean with decay {recipe.ema:g}' if checkpoint['weights'] == 'averaged' else ''}",
        "checkpoint": checkpoint,
        "validation": {name: value if math.isfinite(value) else None for name, value in metrics.items()},  # JSON has no NaN
        "task": task_info,
        "vitrail": __version__,
    }
    unlabelled = isinstance(task, Masked)
    save(
        folder,
        model,
        preprocess=prepared.preprocess,
        classes=None if unlabelled else prepared.classes,
        task="unlabelled" if unlabelled else task.kind,
        provenance=provenance,
    )


def _lora(spec: ModelSpec) -> dict[str, Any]:
    if not spec.lora:
        return {}
    return {"lora": {"rank": spec.lora, "alpha": spec.lora_alpha or spec.lora, "on": list(spec.lora_on), "merged": True}}


def record_images(recipe: Recipe, prepared: Prepared) -> list[dict[str, Any]]:
    """Return records of the images that this run trains on, then of those of its starting checkpoint and of its teacher."""
    spec = recipe.data
    chosen = {name: getattr(spec, name) for name in ("train", "holdout", "holdout_rule", "fraction")}
    if prepared.opened is not None:
        if prepared.validation is not None:
            chosen["validation"] = prepared.validation.name
        own = record(prepared.opened, prepared.train, **chosen)
    else:  # images that were opened in Python
        own = record_split(prepared.source, prepared.train)
    others = (*_records_of(recipe.model.start), *_records_of(recipe.task.teacher))
    return [one.to_dict() for one in (own, *others)]


def rounded_threshold(score: float) -> float:
    """Round the score of an image to a threshold that it reaches: down, and by more than another kernel's rounding changes it.

    0.5 stays: it is no image's score but that of a label that never occurs.
    """
    return score if score == 0.5 else max(math.floor(score * 1e6 - 0.5), 0) / 1e6


def with_earlier(saved: list[dict[str, Any]] | None, now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of a resumed run: those of now, and those from before its images changed."""
    names = {one.get("names") for one in now}
    return [*now, *(one for one in saved or [] if one.get("names") not in names)]


def changed_images(run: RunFolder, prepared: Prepared) -> str | None:
    """Return a warning if a run is resumed with other training images than it began with."""
    saved, own = run.saved_images(), prepared.trained_on
    if not saved or prepared.opened is None or saved[0].get("names") == own[0]["names"]:
        return None
    counts = f"it had {saved[0]['images']:,} training images, and now has {own[0]['images']:,}"
    return (
        f"warning: {own[0]['source']} has changed since this run began: {counts}. "
        "Images may have moved between training and validation; a new run would be exact."
    )


def held_out_before(recipe: Recipe, prepared: Prepared) -> list[str]:
    """Return a warning for the starting checkpoint and for the teacher if they were trained on the labels of held-out images."""
    source, held_out = prepared.opened, prepared.validation
    warnings = []
    for what, reference in (("starting checkpoint", recipe.model.start), ("teacher", recipe.task.teacher)):
        if reference is None or source is None or held_out is None or not recipe.data.holdout:
            continue
        found = overlap(_records_of(reference, labelled=True), source, held_out)
        if found is not None and found.images:
            which = f"{'' if found.exact else 'at least '}{found.images:,} of the {counted(len(held_out), 'held-out image')}"
            warnings.append(
                f"warning: the {what} {reference} was trained on {which}, so validation looks better than it is. "
                "Train it with the same --data.holdout."
            )
    return warnings


def _records_of(start: str | None, *, labelled: bool = False) -> tuple[TrainedOn, ...]:
    """Return what a checkpoint was trained on; with `labelled` nothing for one that was trained without labels."""
    from vitrail.checkpoints.loading import locate

    found = locate(start) if start is not None else None
    if found is None or found.kind != "vitrail" or found.config is None:
        return ()
    if labelled and found.config.get("task") == "unlabelled":
        return ()
    return records_in(found.config.get("provenance", {}), found.name)


def plain_copy(model: Model) -> Model:
    """Return the whole model on the CPU, without what training wrapped it in."""
    copy = build_model(model.config, device="cpu", seed=0)
    state = {name: whole(value).detach().cpu() for name, value in model.state_dict().items()}
    copy.load_state_dict(merged_state(model, state))
    return copy.eval()


@torch.no_grad()
def unstandardise(model: Model, task: Regress) -> None:
    """Put the standardisation of the targets into the head, so that it predicts in their own units."""
    mean, std = task.mean.cpu(), task.std.cpu()
    for head in (model.head, getattr(model, "distill_head", None)):
        if isinstance(head, torch.nn.Linear):
            head.weight.mul_(std[:, None])
            head.bias.mul_(std).add_(mean)


def resolved(
    recipe: Recipe, prepared: Prepared, world: World, *, precision: str, total: int, schedule: ScheduleSpec, micro_batch: int
) -> dict[str, Any]:
    """Return everything that the recipe left open, as it was decided."""
    return {
        "steps": total,
        "steps_per_epoch": len(prepared.train) // recipe.batch,
        "warmup_steps": schedule.warmup,
        "cooldown_steps": schedule.cooldown,
        "images": len(prepared.train),
        "trained_on": prepared.trained_on,
        "validation_images": len(prepared.validation) if prepared.validation is not None else 0,
        "classes": list(prepared.classes),
        "task": prepared.task.describe(),
        "model": prepared.model.config.to_dict(),
        "preprocess": prepared.preprocess.to_dict(),
        "precision": precision,
        "micro_batch": micro_batch,
        "accumulation": math.ceil(recipe.batch / world.ranks / micro_batch),
        "ranks": world.ranks,
        "parallel": world.mode,
        "device": device_name(world.device),
        "update": explain(recipe.optim),
        "versions": {"vitrail": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({torch.get_num_threads()} threads)"
