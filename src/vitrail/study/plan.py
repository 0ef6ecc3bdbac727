"""From a study and its settings to rows: which models, with which recipes, how long, so that all of it fits the budget."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail.data import open_source
from vitrail.data.split import training_part
from vitrail.errors import VitrailError, counted, reason_of
from vitrail.files import write_text
from vitrail.regular_files import read_json_object
from vitrail.study.definition import Point, Study, changed
from vitrail.study.ladders import Ladder, ladder_for
from vitrail.study.rows import LEFT_OUT, Row
from vitrail.study.settings import StudySettings, public_name
from vitrail.study.speeds import Speeds, cost, kind
from vitrail.train.config import FREE, Recipe
from vitrail.train.parallel import choose_device
from vitrail.train.plain import flatten

SHORTEST = 0.1  # of the full length: below that, points are left out instead
SAFETY = 0.9  # of the budget is planned for
MEASURING = 0.25  # of the budget: where measuring the speed takes longer, on a busy machine, the rest is added to the budget
LATE = "the budget was over before they started; the same command runs them"


@dataclass(frozen=True)
class PlannedRow:
    """One point with one seed, and its two recipes."""

    study: str
    number: int
    """Of the point in the study's grid."""
    point: Point
    seed: int
    pretrain: Recipe | None
    finetune: Recipe | None

    @cached_property
    def key(self) -> str:
        return _hashed([self.study, self.point.series, self.point.label, _identity(self.pretrain), _identity(self.finetune)])

    @cached_property
    def pretrain_key(self) -> str:
        """Rows with the same one share their pre-training."""
        return _hashed(_identity(self.pretrain)) if self.pretrain is not None else f"none-{self.key}"

    @property
    def name(self) -> str:
        return f"{self.point.series}, {self.point.label}, seed {self.seed}"

    def row(self, settings: StudySettings, **values: Any) -> Row:
        """Return a row of results with what is known beforehand."""
        return Row(
            study=self.study,
            point=self.number,
            series=self.point.series,
            label=self.point.label,
            x=self.point.x,
            seed=self.seed,
            key=self.key,
            data=public_name(settings.data),
            target=public_name(settings.target or ""),
            command=settings.command(self.study),
            **values,
        )


def _identity(recipe: Recipe | None) -> Any:
    """Everything that decides a run's result."""
    return None if recipe is None else {name: value for name, value in flatten(recipe).items() if name not in FREE}


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be run, at which length. It is stored, so that a resumed study has the same rows whatever the speed is then."""

    study: Study
    settings: StudySettings
    ladder: Ladder
    images: int
    """In the pre-training set."""
    target_images: int
    kept: tuple[int, ...]
    """The points that are run, by their number."""
    scale: float = 1.0
    """Length of the runs, relative to the full one."""
    estimate: float | None = None
    """Expected seconds; None if the speed was not measured."""
    part_images: Mapping[float, int] = field(default_factory=dict)
    """Images in each part of the pre-training set: every class is rounded by itself."""

    def rows(self, points: Iterable[int] | None = None) -> list[PlannedRow]:
        """Return the rows in the order in which they are run: the first seed of every point before the second, the most important
        points first, so that a study that is cut off shows what matters."""
        everything = self.study.points(self.ladder)
        chosen = sorted(self.kept if points is None else points, key=lambda number: (everything[number].priority, number))
        return [self._row(number, everything[number], seed) for seed in range(self.settings.seeds) for number in chosen]

    def left_out(self) -> list[PlannedRow]:
        return self.rows(number for number in range(len(self.study.points(self.ladder))) if number not in self.kept)

    def _row(self, number: int, point: Point, seed: int) -> PlannedRow:
        settings, ladder = self.settings, self.ladder
        pretrain = finetune = None
        common = {"seed": seed, "device": settings.device, "log_every": 50}
        if point.pretrain is not None:
            recipe = changed(ladder.pretrain(), {**point.pretrain, **common, "data.source": settings.data})
            seen = ladder.epochs * self.images * self.scale * point.length
            part = recipe.data.fraction
            pretrain = _with_length(recipe, seen, available=self.part_images.get(part, max(1, int(self.images * part))))
        if self.study.finetune:
            recipe = changed(ladder.finetune(), {**common, "data.source": settings.target, **point.finetune})
            finetune = _with_length(recipe, ladder.finetune_epochs * self.target_images * self.scale, available=self.target_images)
        return PlannedRow(self.study.name, number, point, seed, pretrain, finetune)

    def save(self, file: Path) -> None:
        content = {
            "settings": self.settings.identity(),
            "ladder": dataclasses.asdict(self.ladder),
            "images": self.images,
            "target_images": self.target_images,
            "part_images": {str(part): count for part, count in self.part_images.items()},
            "kept": list(self.kept),
            "scale": self.scale,
            "estimate": self.estimate,
        }
        write_text(file, json.dumps(content, indent=2) + "\n")


def _with_length(recipe: Recipe, seen: float, *, available: int) -> Recipe:
    """Set the number of steps for a number of images; small sets have small batches."""
    batch = min(recipe.batch, available)
    steps = max(1, round(seen / batch))
    return recipe.replace(batch=batch, steps=steps, checkpoint_every=max(1, -(-steps // 4)))


def full_plan(study: Study, settings: StudySettings) -> Plan:
    """Return the whole study at its full length."""
    train = open_source(settings.data).split("train")
    target = open_source(settings.target or settings.data).split("train")
    for split, source in ((train, settings.data), (target, settings.target)):
        if len(split) == 0:
            raise VitrailError(f"The training split of {source} has no images. Choose another source.")
    if target.task != "classify":
        raise VitrailError(
            f"{settings.target} has {target.task} targets; studies transfer to one class per image. Choose another --target."
        )
    ladder = ladder_for(
        train,
        source=settings.data,
        image_size=settings.image_size,
        channels=settings.channels,
        name=settings.ladder,
        device=choose_device(settings.device).type,
        epochs=settings.epochs,
        finetune_epochs=settings.finetune_epochs,
    )
    points = study.points(ladder)
    parts = {one.pretrain["data.fraction"] for one in points if one.pretrain and "data.fraction" in one.pretrain}
    return Plan(
        study=study,
        settings=settings,
        ladder=ladder,
        images=len(train),
        target_images=len(target),
        kept=tuple(range(len(points))),
        part_images={part: len(training_part(train, part)) if part < 1 else len(train) for part in sorted(parts)},
    )


def stored_plan(file: Path, study: Study, settings: StudySettings) -> Plan | None:
    """Read the plan of an earlier run; None if there is none. One with other settings is refused."""
    if not file.exists():
        return None
    try:
        content = read_json_object(file)
        before, now = content["settings"], json.loads(json.dumps(settings.identity()))
        fields = {name: content[name] for name in ("images", "target_images", "scale", "estimate")}
        parts = {float(part): int(count) for part, count in content.get("part_images", {}).items()}  # older plans have none
        ladder, kept = Ladder(**content["ladder"]), tuple(content["kept"])
        plan = Plan(study=study, settings=settings, ladder=ladder, kept=kept, part_images=parts, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VitrailError(
            f"{file} is not the plan of a study ({reason_of(error)}). Choose another --out, or remove it."
        ) from error
    changes = [f"{name} {before.get(name)!r} → {now[name]!r}" for name in now if before.get(name) != now[name]]
    if changes:
        raise VitrailError(
            f"{file.parent} holds this study with other settings: {'; '.join(changes)}. "
            "To resume it, use its settings; for a new one, choose another --out."
        )
    return plan


@dataclass(frozen=True)
class Estimate:
    """Seconds that a study takes, for any choice of points and any length."""

    training: dict[int, tuple[str, float, float]]
    """By point: the key of its pre-training, and the seconds of pre-training and of fine-tuning at full length."""
    overhead: float
    """Of a row."""
    seeds: int
    jobs: int

    def seconds(self, kept: Iterable[int], scale: float) -> float:
        """Return the time with the work shared evenly among the processes, and at least that of what only one process can do.

        That are the rows that share their pre-training, which is done once.
        """
        groups: dict[str, float] = {}
        for number in kept:
            key, pretrain, finetune = self.training[number]
            groups[key] = groups.get(key, scale * pretrain) + scale * finetune + self.overhead
        return max(self.seeds * sum(groups.values()) / self.jobs, max(groups.values(), default=0.0))


def fitted(plan: Plan, speeds: Speeds, seconds: float | None, jobs: int) -> Plan:
    """Shorten a plan until it takes no more than `seconds`: first the runs, then, point by point, the grid."""
    rows = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, seeds=1)).rows()
    training = {row.number: (row.pretrain_key, *speeds.training(row)) for row in rows}
    estimate = Estimate(training, speeds.overhead, plan.settings.seeds, jobs)
    kept, scale = list(plan.kept), 1.0
    if seconds is not None:
        kept = _kept(plan, estimate, SAFETY * seconds)
        low, high = SHORTEST, 1.0
        while high - low > 0.001:  # the length at which it just fits
            middle = (low + high) / 2
            low, high = (middle, high) if estimate.seconds(kept, middle) <= SAFETY * seconds else (low, middle)
        scale = 1.0 if estimate.seconds(kept, 1.0) <= SAFETY * seconds else round(low, 3)
    return dataclasses.replace(plan, kept=tuple(kept), scale=scale, estimate=estimate.seconds(kept, scale))


def _kept(plan: Plan, estimate: Estimate, seconds: float) -> list[int]:
    """Leave points out, the least important first, until the shortest form fits."""
    points, kept = plan.study.points(plan.ladder), list(plan.kept)
    while (shortest := estimate.seconds(kept, SHORTEST)) > seconds:
        last = max(kept, key=lambda number: (points[number].priority, number))
        if points[last].priority == 0:
            needed, left = shortest / SAFETY / 60, seconds / SAFETY / 60
            budget, enough = plan.settings.budget or left, math.ceil(1.2 * needed / (1 - MEASURING))
            raise VitrailError(
                f"Even the shortest form of the study {plan.study.name} ({counted(estimate.seeds * len(kept), 'row')}) takes about "
                f"{needed:.1f} minutes here; of the budget of {budget:g} minutes {max(left, 0.0):.1f} are left after measuring the "
                f"speed. Use --budget {enough}, fewer seeds or smaller models."
            )
        kept.remove(last)
    return kept


def describe(plan: Plan, jobs: int) -> list[str]:
    """Say what is planned, and what is left out."""
    rows, ladder = plan.rows(), plan.ladder
    lines = [
        f"{plan.study.name}: {plan.study.title.lower()}, as {plan.study.mirrors} of the paper",
        f"{public_name(plan.settings.data)} ({plan.images:,} images) → {public_name(plan.settings.target or '')} "
        f"({plan.target_images:,} images), {ladder.name} models at {ladder.image_size} pixels",
    ]
    pretrain = f"{ladder.epochs * plan.scale:.3g} epochs of pre-training"
    finetune = f", {ladder.finetune_epochs * plan.scale:.3g} of fine-tuning" if plan.study.finetune else ""
    shortened = f" ({100 * plan.scale:.0f} % of the full length, to fit the budget)" if plan.scale < 1 else ""
    lines.append(f"planned: {counted(len(rows), 'row')}, {counted(jobs, 'process', 'processes')}; {pretrain}{finetune}{shortened}")
    if plan.estimate is not None:
        lines[-1] += f"; about {plan.estimate / 60:.1f} minutes"
    missing = [f"{row.point.series} {row.point.label}" for row in plan.left_out() if row.seed == 0]
    if missing:
        lines.append(f"left out, for the budget: {', '.join(missing)}")
    return lines


def left_out_rows(plan: Plan) -> list[Row]:
    """Return rows for the points that the plan leaves out, so that the file says so."""
    note = f"the budget of {plan.settings.budget:g} minutes was too short" if plan.settings.budget else ""
    return [row.row(plan.settings, status=LEFT_OUT, note=note) for row in plan.left_out()]


def late_rows(plan: Plan, finished: set[str]) -> list[Row]:
    """Return rows for what was planned and not started; they are replaced when the study is resumed."""
    return [row.row(plan.settings, status=LEFT_OUT, note=LATE) for row in plan.rows() if row.key not in finished]


def probes(plan: Plan) -> list[PlannedRow]:
    """Return the rows to measure the speed with: of each kind of run the cheapest and, if it differs much, the most expensive."""
    by_kind: dict[str, list[tuple[float, PlannedRow]]] = {}
    for row in plan.rows():
        if row.seed == 0 and (recipe := row.pretrain or row.finetune) is not None:
            by_kind.setdefault(kind(recipe), []).append((cost(recipe), row))
    chosen = []
    for rows in by_kind.values():
        rows.sort(key=lambda one: one[0])
        (low, cheapest), (high, costliest) = rows[0], rows[-1]
        chosen += [cheapest, costliest] if high > 1.3 * low else [cheapest]
    return chosen
