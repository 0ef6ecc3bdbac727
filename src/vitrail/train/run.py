"""The run folder: what a run was, what it did, and where it stands.

config.json     the recipe, and everything resolved from it
metrics.jsonl   one record per line: `train`, `val`, and `end` when the run is finished
checkpoints/    to resume from
model/          the result, to be used by every other command
figures/        curves
evaluation/     a page with the metrics of the result (written by `vitrail train` and `finetune`)
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vitrail.data.settings import BY_NAME
from vitrail.errors import VitrailError, did_you_mean, reason_of
from vitrail.files import disk_errors, restore_folders, take_lock, write_text
from vitrail.regular_files import parse_json, read_bytes, read_json_object
from vitrail.train.config import FREE, Recipe
from vitrail.train.lengths import length_in_steps
from vitrail.train.plain import differences, flatten
from vitrail.train.saved_model import SavedModel
from vitrail.train.upgrade import FORMAT, upgrade

log = logging.getLogger("vitrail.train")

T = TypeVar("T")

_MAX_LOG = 1 << 34


def number_in(record: dict[str, Any], name: str) -> float:
    """Return a number of a record; NaN if it has none, as after a bit of the file changed."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else math.nan


def _checked(record: Any) -> dict[str, Any]:
    """Return a record of metrics.jsonl; raise an error if it is not one."""
    if not (isinstance(record["kind"], str) and isinstance(record["step"], int) and 0 <= record["step"] < 1 << 53):
        raise ValueError
    if record["kind"] == "end":
        if not (isinstance(record["headline"], str) and math.isfinite(number_in(record, "seconds"))):
            raise ValueError
        if "model" in record:
            SavedModel.from_dict(record["model"])
    return dict(record)


def _records_in(value: Any) -> list[dict[str, Any]] | None:
    if value is not None and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise TypeError("'trained_on' is not a list of objects")
    return value


class RunFolder:
    """One run's folder, held by one process group at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: Any = None
        self._new_folders: list[Path] = []
        self._bad_lines: set[bytes] = set()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    def hold(self) -> None:
        """Lock the folder, so that no second process writes into it. The system unlocks it when this process ends."""
        try:
            self._new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path / ".lock")
        except OSError as error:
            raise VitrailError(
                f"Cannot write into {self.path}: {error.strerror}. Choose another folder with --out, or change its permissions."
            ) from error
        if self._lock is None:
            raise VitrailError(f"Another process is training in {self.path}. Wait for it, or choose another --out.")
        restore_folders(self.path)

    def release(self) -> None:
        """Unlock the folder; remove it, and parents made with it, if nothing was written there."""
        if self._lock is None:
            return
        with suppress(OSError):  # the folder may have been removed meanwhile
            if self._new_folders and [path.name for path in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                for folder in self._new_folders:
                    folder.rmdir()
        self._lock.close()
        self._lock = None

    def has_begun(self) -> bool:
        """Tell whether a run was started here before."""
        return (self.path / "config.json").exists()

    def saved_recipe(self) -> Recipe | None:
        """Return the recipe of the run in this folder; None in a new folder."""
        return self._read_config(lambda config: Recipe.from_dict(config["recipe"]))

    def saved_precision(self) -> str | None:
        """Return the precision that this run started with; None in a new folder."""
        return self._read_config(lambda config: str(config["resolved"]["precision"]))

    def saved_images(self) -> list[dict[str, Any]] | None:
        """Return the records of the images that this run is trained on; None in a new folder or that of an older version."""
        return self._read_config(lambda config: _records_in(config["resolved"].get("trained_on")))

    def keep_split(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the saved rules of splitting, so that a run of an older version keeps its validation images."""
        saved = self.saved_recipe()
        if saved is None:
            return recipe
        rules = ("split_rule", "holdout_rule")
        kept = {name: getattr(saved.data, name) for name in rules if getattr(recipe.data, name) == BY_NAME}
        return recipe.replace(data=dataclasses.replace(recipe.data, **kept))

    def keep_warmup(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the saved warm-up in steps, where it is the same length as the recipe's part of the run.

        Fine-tuning runs of older versions have it in steps, rounded down.
        """
        saved = self.saved_recipe()
        if saved is None or recipe.steps is None or saved.steps != recipe.steps:
            return recipe
        old, new = saved.schedule.warmup, recipe.schedule.warmup
        if not isinstance(old, int) or not str(new).endswith("%") or not 0 <= length_in_steps(new, recipe.steps, 1) - old <= 1:
            return recipe
        return recipe.replace(schedule=dataclasses.replace(recipe.schedule, warmup=old))

    def _read_config(self, read: Callable[[dict[str, Any]], T]) -> T | None:
        file = self.path / "config.json"
        if not file.exists():
            return None
        try:
            config = upgrade(read_json_object(file))
            if not isinstance(config.get("resolved", {}), dict):
                raise TypeError("'resolved' is not an object")
            return read(config)
        except VitrailError as error:
            raise VitrailError(f"{file}: {error} For a new run, choose another --out.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise VitrailError(f"{file} is not a run's configuration ({reason_of(error)}). Choose another --out.") from error

    def check_unchanged(self, recipe: Recipe, allowed: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
        """Refuse to resume a run with other settings than it started with, unless these are named; return what changed."""
        allowed = tuple(name.replace("-", "_") for name in allowed)
        for name in allowed:
            if name not in flatten(recipe):
                raise VitrailError(f"--allow-change names {name!r}, which is not a setting.{did_you_mean(name, flatten(recipe))}")
        saved = self.saved_recipe()
        if saved is None:
            if any((self.path / "checkpoints").glob("step-*")) or (self.path / "metrics.jsonl").exists():
                log.warning("%s has a run without config.json: it is not known whether it began with these settings.", self.path)
            return {}
        changed = {key: both for key, both in differences(saved, recipe).items() if key not in FREE}
        refused = {key: both for key, both in changed.items() if key not in allowed}
        if refused:
            rows = "\n".join(f"  {key}: {old!r} → {new!r}" for key, (old, new) in sorted(refused.items()))
            raise VitrailError(
                f"{self.path} holds a run with other settings:\n{rows}\n"
                f"To resume it, use its settings. For a new run, choose another --out. "
                f"To resume it with the new settings, add --allow-change {' '.join(sorted(refused))}."
            )
        return changed

    def write_config(self, recipe: Recipe, resolved: dict[str, Any]) -> None:
        config = {"format": FORMAT, "recipe": recipe.to_dict(), "resolved": resolved}
        write_text(self.path / "config.json", json.dumps(config, indent=2) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl. One that is not a record is left out with a warning, or without one if it is the last
        and was cut off by a crash."""
        file = self.path / "metrics.jsonl"
        records = []
        try:
            lines = read_bytes(file, _MAX_LOG).split(b"\n") if file.exists() else []
        except OSError as error:
            raise VitrailError(f"{file} cannot be read: {error.strerror}. Choose another --out.") from error
        for number, line in enumerate(lines, 1):
            try:
                records.append(_checked(parse_json(line)))
            except (ValueError, KeyError, TypeError):
                if number < len(lines) and line not in self._bad_lines:
                    self._bad_lines.add(line)
                    log.warning("Line %d of %s is corrupted and left out.", number, file)
        return records

    def seconds(self) -> float:
        """Return the time that the recorded training steps took."""
        speeds = [one.get("speed") for one in self.records() if one["kind"] == "train"]
        times = [number_in(speed, "seconds") for speed in speeds if isinstance(speed, dict)]
        return sum(one for one in times if math.isfinite(one))

    def add(self, record: dict[str, Any]) -> None:
        file = self.path / "metrics.jsonl"
        with disk_errors(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def keep_log(self) -> Path | None:
        """Give metrics.jsonl a name under which it is not overwritten; return it."""
        if not self.records():
            return None
        numbers = itertools.count(1)
        kept = next(path for number in numbers if not (path := self.path / f"metrics-{number}.jsonl").exists())
        return (self.path / "metrics.jsonl").replace(kept)

    def forget_after(self, step: int) -> None:
        """Drop records of steps that will be taken again."""
        kept = [one for one in self.records() if one["step"] <= step and one["kind"] != "end"]
        # A validation at the step of a checkpoint is written before it, and so is not repeated.
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(one) + "\n" for one in kept))

    def end(self) -> dict[str, Any] | None:
        """Return the final record of a finished run."""
        records = self.records()
        return records[-1] if records and records[-1]["kind"] == "end" and self.model.exists() else None
