"""Vitrail's own checkpoint: a folder with the weights as safetensors and a config.json that says everything else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.checkpoints import golden
from vitrail.checkpoints.archive import Archive, damage_named, open_archive
from vitrail.checkpoints.mapping import read_state, row
from vitrail.checkpoints.report import Report
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError
from vitrail.files import atomic_folder
from vitrail.models import Model, ModelConfig, empty_model, fill_fixed_tables

VERSION = 1
SHARD_SIZE = 4 << 30  # bytes; what some file systems and hosts still take as one file
TASKS = ("classify", "multilabel", "regress", "unlabelled")
_MODEL, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_OWN = {_CONFIG, _INDEX, "preprocessor_config.json", "README.md", ".gitattributes"}


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    preprocess: Preprocess | None = None,
    classes: Sequence[str] | None = None,
    task: str = "classify",
    provenance: Mapping[str, Any] | None = None,
    shard_size: int = SHARD_SIZE,
    read_back: bool = False,
) -> None:
    """Write a checkpoint folder, wholly or not at all. A checkpoint of that name is replaced, anything else is left alone.

    The model may be compiled, wrapped for data parallelism, on any device and in any mode; it is not changed. `classes` are
    the names of the outputs in order, `provenance` says where the weights come from, in words of your own. With `read_back`
    the folder is loaded and fully verified before it gets its name.
    """
    bare, state = _bare_state(model)
    config: ModelConfig = bare.config  # type: ignore[assignment]
    check_task(task, classes, config.outputs)
    copy = fill(empty_model(config), state)
    described = {
        "format": "vitrail",
        "version": VERSION,
        "model": config.to_dict(),
        "preprocess": preprocess.to_dict() if preprocess else None,
        "classes": list(classes) if classes is not None else None,
        "task": task,
        "provenance": dict(provenance or {}),
        "golden": golden.record(copy),
    }
    target = Path(folder)
    check_replaceable(target)
    with atomic_folder(target) as temporary:
        files = write_shards(temporary, state, shard_size)
        described["weights"] = {
            "parameters": sum(tensor.numel() for tensor in state.values()),
            "dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
            "checksum": checksum(state),
            "sha256": {name: sha256(temporary / name) for name in files},
        }
        (temporary / _CONFIG).write_text(_json(described, target), encoding="utf-8")
        if read_back:
            read(temporary, verify="full")


@dataclasses.dataclass
class Native:
    """A checkpoint folder as read: the model as it was saved, and what else config.json says."""

    model: Model
    state: dict[str, Tensor]
    preprocess: Preprocess | None
    classes: tuple[str, ...] | None
    task: str
    provenance: dict[str, Any]
    report: Report


def read(folder: Path, *, verify: str = "quick", drop: Sequence[str] = ()) -> Native:
    """Load a checkpoint folder; see `vitrail.load` for what `verify` compares."""
    with damage_named(folder):
        described = read_json(folder / _CONFIG)
        _check_version(described, folder)
        config = ModelConfig.from_dict(_part(described, "model", dict, folder))
        report = Report(str(folder), "vitrail")
        files = weight_files(folder)
        archive = joined([open_archive(folder / name) for name in files], folder)
        model = empty_model(config)
        rows = [row(name, name) for name in model.state_dict()]
        state = read_state(archive, rows, model, report, ignored={}, drop=drop, finite=verify == "none")
        weights = _part(described, "weights", dict, folder)
        if verify == "full":
            _check_sha256(folder, files, weights)
        if verify != "none" and checksum(state) != weights.get("checksum"):
            raise VitrailError(
                f"{folder}: the weights are not those that were saved; their checksum differs from config.json's. "
                f"The file was damaged or exchanged: fetch or copy it again. verify='none' loads it all the same."
            )
        fill(model, state)
        if verify != "none":
            golden.check(model, described.get("golden"), str(folder), full=verify == "full")
        preprocess = _part(described, "preprocess", (dict, type(None)), folder)
        classes = _part(described, "classes", (list, type(None)), folder)
        task = _part(described, "task", str, folder)
        names = tuple(str(name) for name in classes) if classes is not None else None
        check_task(task, names, config.outputs)
        return Native(
            model,
            state,
            Preprocess.from_dict(preprocess) if preprocess is not None else None,
            names,
            task,
            _part(described, "provenance", dict, folder),
            report,
        )


def fill(model: Model, state: Mapping[str, Tensor]) -> Model:
    """Make these tensors themselves the parameters of an empty model: nothing is copied."""
    model.load_state_dict(state, assign=True)
    fill_fixed_tables(model)
    return model.eval()


def write_shards(folder: Path, state: Mapping[str, Tensor], limit: int) -> list[str]:
    """One `model.safetensors`, or several with an index as the hub lays them out; returns the files' names."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    total = len(shards)
    names = [_MODEL] if total == 1 else [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if total > 1:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return names


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's weight files, from the index where there is one."""
    if (folder / _INDEX).is_file():
        places = read_json(folder / _INDEX).get("weight_map")
        names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
        if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
            raise VitrailError(f"{folder / _INDEX} does not list safetensors files of this folder. It is damaged.")
        return names
    for name in (_MODEL, "pytorch_model.bin"):
        if (folder / name).is_file():
            return [name]
    raise VitrailError(f"{folder} has a config.json but no weights: {_MODEL} or pytorch_model.bin is missing.")


def joined(archives: Sequence[Archive], folder: Path) -> Archive:
    """Shards as one archive."""
    whole = Archive(folder if len(archives) > 1 else archives[0].path, archives[0].kind, {})
    for archive in archives:
        twice = whole.entries.keys() & archive.entries.keys()
        if twice:
            raise VitrailError(
                f"{archive.path} holds {min(twice)!r}, which another file of {folder} holds too. They do not belong together."
            )
        whole.entries.update(archive.entries)
        whole.notes += archive.notes
    return whole


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise VitrailError(f"{path} is not valid JSON ({error}). It is damaged: fetch or copy it again.") from error
    if not isinstance(values, dict):
        raise VitrailError(f"{path} holds a {type(values).__name__} where an object with named values was expected.")
    return values


def checksum(state: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes and the sums of all bit patterns, at the speed of memory.

    Any single changed value changes it; SHA-256, which finds every change, takes several times as long.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        word = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}[tensor.element_size()]
        bits = tensor.view(word[0]).numpy().reshape(-1).view(word[1])
        total = int(np.add.reduce(bits, dtype=word[1]))
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total}\n".encode())
    return digest.hexdigest()[:32]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_replaceable(target: Path) -> None:
    """Only a checkpoint may be replaced by a checkpoint: never a folder with anything else in it."""
    if not target.exists():
        return
    if not target.is_dir():
        raise VitrailError(f"{target} is a file; a checkpoint is a folder. Choose another name.")
    inside = [item.name for item in target.iterdir()]
    foreign = [name for name in inside if name not in _OWN and not (name.startswith("model") and name.endswith(".safetensors"))]
    if foreign or (inside and _CONFIG not in inside):
        raise VitrailError(
            f"{target} is there already and is not only a checkpoint ({', '.join(sorted(foreign or inside)[:4])}). "
            f"It is left as it is: choose another folder."
        )


def _bare_state(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    while not hasattr(model, "config"):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise VitrailError(f"A {type(model).__name__} cannot be saved: only Vitrail's models, wrapped or not, have a config.")
        model = inner
    state = {}
    for name, tensor in model.state_dict().items():
        plain = name.replace("_orig_mod.", "").removeprefix("module.")
        state[plain] = tensor.detach().cpu().contiguous()
        if not torch.isfinite(state[plain]).all():
            raise VitrailError(
                f"{plain} holds values that are not finite (NaN or infinite): the training diverged. Nothing was saved."
            )
    return model, state


def check_task(task: str, classes: Sequence[str] | None, outputs: int) -> None:
    if task not in TASKS:
        raise VitrailError(f"The task is {task!r}; it can be {', '.join(TASKS)}.")
    if classes is not None and len(classes) != outputs:
        raise VitrailError(f"{len(classes)} class names were given for a model with {outputs} outputs. Each output needs one.")


def _check_version(described: Mapping[str, Any], folder: Path) -> None:
    version = described.get("version")
    if described.get("format") != "vitrail" or not isinstance(version, int):
        raise VitrailError(f"{folder / _CONFIG} does not say that this is a Vitrail checkpoint.")
    if version > VERSION:
        raise VitrailError(f"{folder} is in format {version}; this Vitrail reads up to {VERSION}. Update Vitrail to load it.")


def _part(described: Mapping[str, Any], name: str, kind: Any, folder: Path) -> Any:
    if name not in described or not isinstance(described[name], kind):
        raise VitrailError(f"{folder / _CONFIG}: {name!r} is missing or not what it should be. The file is damaged.")
    return described[name]


def _check_sha256(folder: Path, files: Sequence[str], weights: Mapping[str, Any]) -> None:
    stored = weights.get("sha256")
    for name in files:
        expected = stored.get(name) if isinstance(stored, dict) else None
        found = sha256(folder / name)
        if found != expected:
            raise VitrailError(f"{folder / name} has SHA-256 {found}, not {expected} as when it was saved. Fetch or copy it again.")


def _json(values: Mapping[str, Any], target: Path) -> str:
    try:
        return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise VitrailError(f"{target}: provenance and class names must be plain values for JSON ({error}).") from error
