"""Checkpoints of a run in progress: everything needed to resume exactly.

Each is a folder in torch's distributed-checkpoint format, so a run may be resumed with another number of ranks or shards, next to
a `state.json` with the place in the run and a checksum of every file. It is written under a temporary name and renamed when
whole. The format uses pickle: resume only runs you trust. The finished model is saved apart, in the safe format.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from vitrail.errors import VitrailError
from vitrail.files import atomic_folder, sha256
from vitrail.train.parallel import World
from vitrail.train.upgrade import FORMAT, upgrade_state

log = logging.getLogger("vitrail.train")


class Snapshots:
    """The checkpoints of one run. Saving runs in the background; the next call waits for the last."""

    def __init__(self, folder: Path, world: World, *, keep: int = 2) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Any] | None = None
        self._best: int | None = None
        # Its own group: a checkpoint in the background must not mix its messages with the gradients'.
        self._group: Any = dist.new_group(backend="gloo") if world.ranks > 1 else None
        if world.main and folder.exists():
            for left in folder.glob(".step-*"):  # half-written when a run was killed
                shutil.rmtree(left, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps at which there are checkpoints, newest first."""
        return sorted((int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*")), reverse=True)

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
        except OSError as error:
            raise VitrailError(
                f"A checkpoint could not be written to {self.folder}: {error.strerror or error}. The one before it is valid"
                f"{f' (step {self.steps()[0]})' if self.steps() else ''}. Free some space, then run again to resume."
            ) from error

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
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
        then = "" if step is not None else "; resuming from the one before it"
        whole = next((one for one in candidates if self._is_whole(one, then)), None) if self.world.main else None
        chosen = self.world.broadcast(whole)
        if chosen is None:
            return None
        path = self.path(chosen)
        state = upgrade_state(json.loads((path / "state.json").read_text(encoding="utf-8")))
        if state["tensors"] != shapes(tensors):
            raise VitrailError(_mismatch(path, state["tensors"], shapes(tensors)))
        _quiet()
        with torch.no_grad():
            load_shards(dict(tensors), checkpoint_id=str(path), no_dist=self._group is None, process_group=self._group)
        return state

    def _is_whole(self, step: int, then: str) -> bool:
        fault = damage(self.path(step))
        if fault:
            log.warning("The checkpoint of step %d is corrupted (%s)%s.", step, fault, then)
        return not fault


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint; empty if it is valid."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state["format"] not in (1, FORMAT):
            return f"its format is {state['format']}, not 1 or {FORMAT}"
        for name, digest in state["files"].items():
            if sha256(path / name) != digest:
                return f"{name} does not have its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _quiet() -> None:
    """Silence the warning that there is no process group: one process needs none."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _save(tensors: dict[str, Tensor], folder: Path, group: Any) -> None:
    _quiet()
    try:
        save_shards(dict(tensors), checkpoint_id=str(folder), no_dist=group is None, process_group=group)
    except Exception as error:  # torch wraps what went wrong; a full disk should read as one
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            failures = getattr(cause, "failures", None)
            cause = next(iter(failures.values()))[0] if failures else cause.__cause__ or cause.__context__
        raise (cause or error) from error


def _seal(folder: Path, step: int, state: dict[str, Any]) -> None:
    files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    record = {"format": FORMAT, "step": step, "files": files, **state}
    (folder / "state.json").write_text(json.dumps(record), encoding="utf-8")


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
