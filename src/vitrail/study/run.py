"""Run the rows of a plan: pre-train, transfer, write the row. What is finished is never run again."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.bench.machine import hardware, versions
from vitrail.checkpoints import Bundle, load
from vitrail.errors import VitrailError, counted
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.fewshot import few_shot
from vitrail.evaluate.settings import FewShotSpec
from vitrail.models import ModelConfig, ViTConfig, flops, parameters
from vitrail.models.variants import SIZES
from vitrail.study.inspection import inspection
from vitrail.study.plan import Plan, PlannedRow
from vitrail.study.rows import DONE, FAILED, Results, Row, try_lock
from vitrail.study.settings import StudySettings, public_name
from vitrail.study.speeds import Sample
from vitrail.train.config import Recipe
from vitrail.train.loop import train
from vitrail.train.parallel import World
from vitrail.train.prepare import Prepared, prepare
from vitrail.train.result import Result
from vitrail.train.run import RunFolder

Say = Callable[[str], None]
_PROBE_STEPS = {"cpu": 12, "cuda": 120}
_warm = False
"""Whether this process has run a row."""


class Interrupted(Exception):
    """A signal ended the study; the run in progress was saved."""


def to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Job:
    """Where and with what rows are run."""

    plan: Plan
    folder: Path
    """For the runs."""
    results: Results
    processes: int
    deadline: float | None = None
    """No row starts after this time, in seconds since the epoch."""

    @property
    def settings(self) -> StudySettings:
        return self.plan.settings


@dataclass(frozen=True)
class Phase:
    """One finished training run of a row."""

    recipe: Recipe
    prepared: Prepared
    result: Result
    config: ModelConfig
    images_per_second: float | None

    @property
    def flops(self) -> float:
        assert self.recipe.steps is not None
        return float(self.prepared.flops) * self.recipe.steps * self.recipe.batch

    @property
    def epochs(self) -> float:
        assert self.recipe.steps is not None
        return self.recipe.steps * self.recipe.batch / max(len(self.prepared.train), 1)


def run_remaining(job: Job, world: World, say: Say) -> int:
    """Run all rows that no other process runs or has finished; return how many were left because the time was over.

    Rows that share their pre-training belong together, and are held by one process at a time.
    """
    planned = job.plan.rows()
    keys, late = {row.key for row in planned}, 0
    waiting: dict[str, list[PlannedRow]] = {}
    for row in planned:
        waiting.setdefault(row.pretrain_key, []).append(row)
    while waiting:
        took_one = False
        for name in list(waiting):
            file = job.folder / "locks" / name
            with try_lock(file) if world.main else nullcontext(True) as held:  # the main rank decides for all
                finished = job.results.finished() if world.main else set()
                rows = world.broadcast([row.key for row in waiting[name] if row.key not in finished] if held else None)
                if rows is None:
                    continue  # another process has it
                if rows:
                    late += _run_group(waiting[name], set(rows), job, world, say, keys)
                del waiting[name]
                took_one = True
        if not took_one:
            time.sleep(0.5)
    return late


def _run_group(group: Sequence[PlannedRow], remaining: set[str], job: Job, world: World, say: Say, keys: set[str]) -> int:
    """Run what remains of rows that share their pre-training; return how many were left because the time was over."""
    rows = [row for row in group if row.key in remaining]
    for number, planned in enumerate(rows):
        if world.broadcast(job.deadline is not None and time.time() > job.deadline):
            return len(rows) - number
        try:
            row, _ = run_row(planned, job, world, job.folder / "runs")
        except VitrailError as error:
            reason = " ".join(str(error).split())
            row = planned.row(job.settings, status=FAILED, note=reason, **_environment(job, world))
        if world.main:
            job.results.put([row])
            done = len(job.results.finished() & keys)
            say(f"[{done}/{len(keys)}] {planned.name}: {_outcome(row)}")
        world.barrier()
        if row.status == DONE:
            _remove_model(_folders(planned, job.folder / "runs")[1], job, world)
    failed = {row.key for row in job.results.read() if row.status == FAILED} if world.main else set()
    if not any(row.key in failed for row in group):  # one that is run again needs the pre-trained model
        _remove_model(_folders(rows[0], job.folder / "runs")[0], job, world)
    return 0


def _remove_model(run: Path, job: Job, world: World) -> None:
    """Remove what is large of a run, unless the user keeps the models."""
    if world.main and not job.settings.keep_models:
        for part in ("checkpoints", "model", "reconstruction"):
            shutil.rmtree(run / part, ignore_errors=True)


def _outcome(row: Row) -> str:
    if row.status == FAILED:
        return f"failed: {row.note}"
    found = {"few_shot": f"{row.shots}-shot", "finetuned": "fine-tuned", "pretrained": "pre-training"}
    parts = [f"{name} {100 * value:.1f} %" for metric, name in found.items() if (value := getattr(row, metric)) is not None]
    return f"{', '.join(parts)} ({row.seconds:.1f} s)"


def _folders(row: PlannedRow, runs: Path) -> tuple[Path, Path]:
    return runs / f"pretrain-{row.pretrain_key}", runs / f"finetune-{row.key}"


def run_row(planned: PlannedRow, job: Job, world: World, runs: Path) -> tuple[Row, tuple[Phase | None, Phase | None]]:
    """Pre-train, evaluate few-shot accuracy, fine-tune; each part is resumed where it was cut off."""
    began = time.perf_counter()
    before, after = _folders(planned, runs)
    pretrain = finetune = None
    values: dict[str, Any] = {}
    if planned.pretrain is not None:
        pretrain = _train(planned.pretrain, before, job, world)
        metrics = pretrain.result.metrics
        values |= {"pretrained": metrics.get("accuracy"), "relative_loss": metrics.get("relative_loss")}
        if job.plan.study.few_shot or job.plan.study.inspect:
            values |= _evaluate(before / "model", job, world)
    if planned.finetune is not None:
        start = str(before / "model") if pretrain is not None else None
        model = dataclasses.replace(planned.finetune.model, start=start)
        finetune = _train(planned.finetune.replace(model=model), after, job, world)
        values["finetuned"] = finetune.result.metrics["accuracy"]
        values["test_images"] = int(finetune.result.metrics["images"])
    values |= _description(pretrain, finetune)
    values["seconds"] = round(time.perf_counter() - began, 3)
    return planned.row(job.settings, status=DONE, **values, **_environment(job, world)), (pretrain, finetune)


def _train(recipe: Recipe, out: Path, job: Job, world: World) -> Phase:
    workers = job.settings.workers if job.settings.workers is not None else recipe.data.workers
    if workers is None and job.processes > 1:
        from vitrail.data.data_wait import max_workers

        workers = max(1, max_workers() // job.processes)
    recipe = recipe.replace(data=dataclasses.replace(recipe.data, workers=workers))
    prepared = prepare(recipe)
    config = prepared.model.config
    result = train(recipe, out, prepared=prepared, curves=False)
    if result.ended_by is not None:
        raise Interrupted(result.ended_by)
    speeds = [one["speed"]["images_per_second"] for one in RunFolder(out).records() if one["kind"] == "train"]
    steady = speeds[len(speeds) // 2 :]  # the first records include what is compiled and tuned
    return Phase(recipe, prepared, result, config, statistics.median(steady) if steady else None)


def _evaluate(model: Path, job: Job, world: World) -> dict[str, Any]:
    """Evaluate a pre-trained model on the target without training it."""
    bundle = load(str(model), device=world.device)
    found: dict[str, Any] = {}
    if job.plan.study.few_shot:
        found = _few_shot(bundle, job, world)
    if job.plan.study.inspect:
        found |= inspection(bundle, job.settings.target or "")
    return found


def _few_shot(bundle: Bundle, job: Job, world: World) -> dict[str, Any]:
    shots = job.settings.shots
    protocol = FewShotSpec(shots=(shots,), seeds=3, small_classes="drop")
    workers = 1 if job.processes > 1 else job.settings.workers
    context = EvalContext(world=world, precision="auto", batch=64 if world.device.type == "cpu" else 512, workers=workers)
    result = few_shot(bundle, job.settings.target or "", protocol=protocol, context=context)
    return {"few_shot": result.mean(shots), "shots": shots, "test_images": result.trials[0].test_images}


def _description(pretrain: Phase | None, finetune: Phase | None) -> dict[str, Any]:
    phase = pretrain or finetune
    assert phase is not None
    config = phase.config
    found: dict[str, Any] = {
        "model": model_text(config),
        "parameters": parameters(config),
        "image_size": config.image_size[0],
        "forward_flops": float(flops(config)),
        "precision": json.loads((phase.result.out / "config.json").read_text(encoding="utf-8"))["resolved"]["precision"],
    }
    for name, one in (("pretrain", pretrain), ("finetune", finetune)):
        if one is not None:
            found |= {
                f"{name}_flops": one.flops,
                f"{name}_steps": one.recipe.steps,
                f"{name}_epochs": round(one.epochs, 3),
                f"{name}_seconds": one.result.seconds,
                f"{name}_recipe": _recipe_text(one.recipe),
            }
    if pretrain is not None:
        found |= {"pretrain_images": len(pretrain.prepared.train), "fraction": pretrain.recipe.data.fraction}
    if finetune is not None:
        payload = finetune.prepared.train.payload(0)
        pixels = None if isinstance(payload, bytes) else min(payload.shape[:2])
        found |= {"finetune_size": finetune.config.image_size[0], "target_pixels": pixels}
    return found


def model_text(config: ModelConfig) -> str:
    """Return a model's name, with its size where that is not the named one's."""
    if not isinstance(config, ViTConfig):
        return config.name
    letters = config.name.split("ViT-")[1].split("/")[0]
    if SIZES.get(letters) == (config.width, config.mlp, config.heads, config.depth):
        return config.name
    kind = config.name.replace(f"ViT-{letters}", "ViT")
    return f"{kind}, {config.depth} × {config.width}, MLP {config.mlp}"


def _recipe_text(recipe: Recipe) -> str:
    """All settings as JSON, without the folders of this machine."""
    content = recipe.to_dict()
    content["data"]["source"] = public_name(content["data"]["source"])
    if content["model"]["start"] is not None:
        content["model"]["start"] = "the pre-trained model"
    return json.dumps(content, separators=(",", ":"))


def _environment(job: Job, world: World) -> dict[str, Any]:
    installed = versions()
    return {
        "hardware": hardware(world.device),
        "processes": job.processes,
        "ranks": world.ranks,
        "vitrail": installed["vitrail"],
        "torch": installed["torch"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def measure(planned: PlannedRow, job: Job, world: World) -> Sample:
    """Run a row with a few steps in a temporary folder, and return what it took.

    Before that it is run with two steps, to load and compile what a process loads and compiles once, on a GPU for each model.
    """
    global _warm
    if not _warm or world.device.type != "cpu":
        _short_run(planned, 2, job, world)
        _warm = True
    began = time.perf_counter()
    phases = _short_run(planned, _PROBE_STEPS.get(world.device.type, 40), job, world)
    per_image = [1 / one.images_per_second if one is not None and one.images_per_second else None for one in phases]
    trained = sum(one.result.seconds for one in phases if one is not None)
    overhead = time.perf_counter() - began - trained
    return Sample(*world.broadcast((per_image[0], per_image[1], overhead)))


def _short_run(planned: PlannedRow, steps: int, job: Job, world: World) -> tuple[Phase | None, Phase | None]:
    short = {"steps": steps, "log_every": max(1, steps // 4), "checkpoint_every": steps}
    pretrain, finetune = (one.replace(**short) if one is not None else None for one in (planned.pretrain, planned.finetune))
    folder = world.broadcast(tempfile.mkdtemp(prefix="vitrail-study-") if world.main else None)
    try:
        probe = dataclasses.replace(planned, pretrain=pretrain, finetune=finetune)
        return run_row(probe, job, world, Path(folder))[1]
    finally:
        if world.main:
            shutil.rmtree(folder, ignore_errors=True)


def late_text(late: int) -> str:
    rows = counted(late, "row was", "rows were")
    return f"The budget is over: {rows} not started. Run the same command again to finish the study."
