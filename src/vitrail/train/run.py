"""The run folder: what a run was, what it did, and where it stands.

config.json     the recipe, and everything resolved from it
metrics.jsonl   one record per line: `train`, `val`, and `end` when the run is finished
checkpoints/    to resume from
model/          the result, to be used by every other command
figures/        curves
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from vitrail.errors import VitrailError, did_you_mean
from vitrail.files import atomic_file, write_text
from vitrail.train.config import FREE, Recipe, differences, flatten
from vitrail.train.upgrade import FORMAT, upgrade

T = TypeVar("T")


class RunFolder:
    """One run's folder, held by one process group at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: Any = None

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
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a+")
        except OSError as error:
            raise VitrailError(
                f"Cannot write into {self.path}: {error.strerror}. Choose another folder with --out, or change its permissions."
            ) from error
        try:
            import fcntl
        except ImportError:
            return  # Windows has no such lock; there the folder is simply trusted
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise VitrailError(f"Another process is training in {self.path}. Wait for it, or choose another --out.") from error

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def saved_recipe(self) -> Recipe | None:
        """Return the recipe of the run in this folder; None in a new folder."""
        return self._read_config(lambda config: Recipe.from_dict(config["recipe"]))

    def saved_precision(self) -> str | None:
        """Return the precision that this run started with; None in a new folder."""
        return self._read_config(lambda config: str(config["resolved"]["precision"]))

    def _read_config(self, read: Callable[[dict[str, Any]], T]) -> T | None:
        file = self.path / "config.json"
        if not file.exists():
            return None
        try:
            return read(upgrade(json.loads(file.read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError) as error:
            raise VitrailError(f"{file} is not a run's configuration ({error}). Choose another --out.") from error

    def check_unchanged(self, recipe: Recipe, allowed: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
        """Refuse to resume a run with other settings than it started with, unless these are named; return what changed."""
        allowed = tuple(name.replace("-", "_") for name in allowed)
        for name in allowed:
            if name not in flatten(recipe):
                raise VitrailError(f"--allow-change names {name!r}, which is not a setting.{did_you_mean(name, flatten(recipe))}")
        saved = self.saved_recipe()
        if saved is None:
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
        """Return the lines of metrics.jsonl; a last one cut off by a crash is left out."""
        file = self.path / "metrics.jsonl"
        records = []
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def add(self, record: dict[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop records of steps that will be taken again."""
        kept = [one for one in self.records() if one["step"] <= step and one["kind"] != "end"]
        # A validation at the step of a checkpoint is written before it, and so is not repeated.
        with atomic_file(self.path / "metrics.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(one) + "\n" for one in kept), encoding="utf-8")

    def end(self) -> dict[str, Any] | None:
        """Return the final record of a finished run."""
        records = self.records()
        return records[-1] if records and records[-1]["kind"] == "end" and self.model.exists() else None
