"""Checkpoints of a run in progress: everything needed to resume exactly.

Each is a folder in torch's distributed-checkpoint format, so a run may be resumed with another number of ranks or shards, next to
a `state.json` with the place in the run and a checksum of every file and of itself. It is written under a temporary name and
renamed when complete. Torch stores the places of tensors as a pickle, which is read here without running it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from vitrail.errors import VitrailError
from vitrail.files import DiskError, atomic_folder, disk_errors, disk_reason, restore_folders, sha256
from vitrail.regular_files import read_json_object
from vitrail.train.nonfinite import nonfinite_weight
from vitrail.train.parallel import World
from vitrail.train.shard_metadata import Reader, read_metadata
from vitrail.train.upgrade import CHECKSUM, FORMAT, upgrade_state

log = logging.getLogger("vitrail.train")

# Held while a checkpoint is written, and for each fork: a child keeps the locks of its parent's threads locked for ever, so that a
# data worker that is forked while a thread writes may hang.
_WRITING = threading.RLock()


@functools.cache
def _register_fork_hooks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_WRITING.acquire, after_in_parent=_WRITING.release, after_in_child=_WRITING.release)


class Snapshots:
    """The checkpoints of one run. Saving runs in the background; the next call waits for the last."""

    def __init__(self, folder: Path, world: World, *, keep: int = 2) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Any] | None = None
        self._best: int | None = None
        # Its own group: a checkpoint in the background must not mix its messages with the gradients'.
        self._group: Any = dist.new_group(backend="gloo") if world.ranks > 1 else None
        _register_fork_hooks()
        if world.main and folder.exists():
            restore_folders(folder)
            for left in folder.glob(".step-*"):  # incomplete when a run was killed
                shutil.rmtree(left, ignore_errors=True)
        self.found_corrupted = False
        """Whether `load` found checkpoints, but none that is valid."""

    def steps(self) -> list[int]:
        """Steps at which there are checkpoints, newest first."""
        numbers = [int(path.name[5:]) for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name, re.ASCII)]
        return sorted((number for number in numbers if self.path(number).is_dir()), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], *, best: int | None = None) -> None:
        """Begin to write a checkpoint. What is saved is copied before this returns, so training may continue.

        Older checkpoints are removed once it is complete, but not that of the step `best`.
        """
        self.finish()
        self._best = best
        copies = {name: _copy(value) for name, value in tensors.items()}
        state = {**state, "tensors": shapes(tensors)}
        self._pending = self._writer.submit(self._write, step, copies, state)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, DiskError) as error:
            reason = disk_reason(error) or getattr(error, "strerror", None) or error
            raise DiskError(
                f"A checkpoint could not be written to {self.folder}: {reason}. "
                f"{f'The one before it is valid (step {self.steps()[0]}). ' if self.steps() else ''}"
                "Free some space, then run again to resume."
            ) from error

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        with _WRITING:
            self._write_and_prune(step, tensors, state)

    def _write_and_prune(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        if self._group is None:
            with atomic_folder(self.path(step)) as temporary:
                _save(tensors, temporary, None)
                _seal(temporary, step, state)
        else:
            self._write_together(step, tensors, state)
        if self.world.main:
            for old in self.steps()[self.keep :]:
                if old != self._best:
                    shutil.rmtree(self.path(old), ignore_errors=True)

    def _write_together(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write all ranks' parts into one folder, which the main rank seals and names."""
        if not self.world.main:
            place = [None]
            dist.broadcast_object_list(place, src=0, group=self._group)
            _save(tensors, Path(str(place[0])), self._group)
            dist.barrier(self._group)
            return
        with atomic_folder(self.path(step)) as temporary:
            dist.broadcast_object_list([str(temporary)], src=0, group=self._group)
            _save(tensors, temporary, self._group)
            _seal(temporary, step, state)
        dist.barrier(self._group)

    def load(self, tensors: dict[str, Tensor], step: int | None = None) -> dict[str, Any] | None:
        """Read the newest valid checkpoint (or that of a step) into `tensors`; its state, or None where there is none."""
        candidates = self.steps() if step is None else [step]
        found, nonfinite = list(candidates), ""
        while True:
            chosen = self.world.broadcast(self._next_valid(candidates, set_aside=step is None) if self.world.main else None)
            if chosen is None and nonfinite:
                raise VitrailError(
                    f"No checkpoint in {self.folder} can be resumed: the weights of each are not finite or it is corrupted. "
                    "Start a new run with another --out and a lower --optim.lr."
                )
            if chosen is None:
                self.found_corrupted = bool(found)
                return None
            state = self._read(self.path(chosen), tensors)
            nonfinite = next(filter(None, self.world.gather(nonfinite_weight(tensors))), "")
            if not nonfinite:
                return state
            log.warning("The checkpoint of step %d is skipped: its weights are not finite, first %s.", chosen, nonfinite)

    def _next_valid(self, candidates: list[int], *, set_aside: bool) -> int | None:
        """Remove and return the first candidate that is valid. Others get a name that is not a checkpoint's: as the newest they
        would outlive those that the run writes now."""
        while candidates:
            path = self.path(step := candidates.pop(0))
            fault = damage(path)
            if not fault:
                return step
            then = ""
            if set_aside and path.exists():
                aside = path.with_name(f"{path.name}.corrupted")
                shutil.rmtree(aside, ignore_errors=True)
                path.replace(aside)
                then = f" It is now called {aside.name}."
            log.warning("The checkpoint of step %d is corrupted (%s).%s", step, fault, then)
        return None

    def _read(self, path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
        state = upgrade_state(read_json_object(path / "state.json"))
        if state["tensors"] != shapes(tensors):
            raise VitrailError(_mismatch(path, state["tensors"], shapes(tensors)))
        _quiet()
        reader = Reader(path, state["files"])
        try:
            with torch.no_grad():
                load_shards(dict(tensors), storage_reader=reader, no_dist=self._group is None, process_group=self._group)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            reason = f"{type(cause).__name__}: {cause}".removesuffix(": ")
            raise VitrailError(f"{path} cannot be read ({reason}). Remove it to resume from the one before it.") from error
        return state


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint; empty if it is valid. One of a newer version is an error."""
    try:
        state = read_json_object(path / "state.json")
        saved = upgrade_state(state)
        if ("checksum" in state or state["format"] >= CHECKSUM) and state.get("checksum") != checksum(state):
            return "state.json does not have its checksum"
        if path.name != f"step-{saved['step']:08d}":
            return f"state.json is that of step {saved['step']}"
        for name, digest in saved["files"].items():
            if Path(name).name != name:
                return f"{name!r} is not the name of a file in it"
            if sha256(path / name) != digest:
                return f"{name} does not have its checksum"
        if not isinstance(saved["tensors"], dict):
            return "state.json does not list its tensors"
        read_metadata(path, saved["files"])
    except VitrailError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _quiet() -> None:
    """Silence the warning that there is no process group: one process needs none."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _save(tensors: dict[str, Tensor], folder: Path, group: Any) -> None:
    _quiet()
    failure: BaseException | None = None
    with disk_errors(folder):
        try:
            save_shards(dict(tensors), checkpoint_id=str(folder), no_dist=group is None, process_group=group)
        except CheckpointException as error:  # not an Exception; it holds those of the ranks
            failure = next(iter(error.failures.values()))[0]
        if failure is not None:  # not raised above: each would be the cause of the other
            raise failure


def _seal(folder: Path, step: int, state: dict[str, Any]) -> None:
    files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    record = {"format": FORMAT, "step": step, "files": files, **state}
    (folder / "state.json").write_text(json.dumps({**record, "checksum": checksum(record)}), encoding="utf-8")


def checksum(state: dict[str, Any]) -> str:
    """Return the SHA-256 of everything in state.json but the checksum itself."""
    others = {name: value for name, value in state.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True) if tensor.device.type != "cpu" else tensor.clone()


def shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in tensors.items()}


def _mismatch(path: Path, saved: dict[str, list[int]], expected: dict[str, list[int]]) -> str:
    lines = [f"- {name} {saved[name]}" for name in saved if expected.get(name) != saved[name]]
    lines += [f"+ {name} {expected[name]}" for name in expected if saved.get(name) != expected[name]]
    shown = "\n".join(lines[:8]) + (f"\n… {len(lines) - 8} more" if len(lines) > 8 else "")
    return (
        f"{path} belongs to another model or optimiser (− saved, + this run):\n{shown}\n"
        "Use the settings of that run, or another --out."
    )
