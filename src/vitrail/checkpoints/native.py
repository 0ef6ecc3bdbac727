"""Vitrail's own checkpoint format: a folder with the weights as safetensors, and everything else in config.json."""

from __future__ import annotations

import dataclasses
import functools
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
from vitrail.checkpoints.archive import FLOATS, Archive, open_archive, wrap_errors
from vitrail.checkpoints.mapping import empty_model_for, read_state, row
from vitrail.checkpoints.report import Report
from vitrail.data.preprocess import Preprocess
from vitrail.errors import VitrailError, counted
from vitrail.files import atomic_folder, sha256
from vitrail.models import Model, ModelConfig, empty_model, fill_fixed_tables
from vitrail.models.lora import merged_state
from vitrail.regular_files import read_json_object
from vitrail.text import to_json

VERSION = 1
SHARD_SIZE = 4 << 30  # bytes; larger files fail on some file systems and hosts
TASKS = ("classify", "multilabel", "regress", "unlabelled")
_MODEL, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_CHECKPOINT_FILES = {_CONFIG, _INDEX, "preprocessor_config.json", "README.md", ".gitattributes"}


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    preprocess: Preprocess | None = None,
    classes: Sequence[str] | None = None,
    task: str = "classify",
    provenance: Mapping[str, Any] | None = None,
    store_dtype: torch.dtype | None = None,
    shard_size: int = SHARD_SIZE,
    read_back: bool = False,
) -> None:
    """Write a checkpoint folder atomically. An existing checkpoint is replaced; a folder with other files is not touched.

    The model may be compiled, wrapped in DDP, on any device and in train or eval mode; it is not changed. LoRA adapters are merged
    in the file. `classes` are the names of the outputs in order, `provenance` is free information on where the weights come from.
    `store_dtype` rounds the weights in the file, for instance to float16; they are loaded in the model's own dtype, and golden
    outputs are those of the rounded weights. With `read_back` the folder is loaded and fully verified before the target is created.
    """
    bare, state = _unwrapped_state(model)
    config: ModelConfig = bare.config  # type: ignore[assignment]
    check_task(task, classes, config.outputs)
    dtypes = {}
    if store_dtype is not None:
        dtypes["load_dtype"] = _dtype_name(functools.reduce(torch.promote_types, [tensor.dtype for tensor in state.values()]))
        state = _rounded(state, store_dtype)
    copy = assign_weights(empty_model(config), _in_load_dtype(state, dtypes, Path(folder)))
    values = {
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
        values["weights"] = {
            "parameters": sum(tensor.numel() for tensor in state.values()),
            "dtype": _dtype_name(next(iter(state.values())).dtype),
            **dtypes,
            "checksum": checksum(state),
            "sha256": {name: sha256(temporary / name) for name in files},
        }
        (temporary / _CONFIG).write_text(_json(values, target), encoding="utf-8")
        if read_back:
            read(temporary, verify="full")


@dataclasses.dataclass
class NativeCheckpoint:
    """A loaded checkpoint folder: the saved model, and the rest of config.json."""

    model: Model
    archive: Archive
    state: dict[str, Tensor]
    preprocess: Preprocess | None
    classes: tuple[str, ...] | None
    task: str
    provenance: dict[str, Any]
    report: Report


def read(folder: Path, *, verify: str = "quick", drop: Sequence[str] = ()) -> NativeCheckpoint:
    """Load a checkpoint folder; `verify` as in `vitrail.load`."""
    with wrap_errors(folder):
        values = read_json(folder / _CONFIG)
        _check_version(values, folder)
        config = ModelConfig.from_dict(_field(values, "model", dict, folder))
        report = Report(str(folder), "vitrail")
        files = weight_files(folder)
        archive = merge([open_archive(folder / name) for name in files], folder)
        model = empty_model_for(config, archive)
        rows = [row(name, name) for name in model.state_dict()]
        state = read_state(archive, rows, model, report, ignored={}, drop=drop, finite=verify == "none")
        weights = _field(values, "weights", dict, folder)
        if verify == "full":
            _check_sha256(folder, files, weights)
        if verify != "none" and checksum(state) != weights.get("checksum"):
            raise VitrailError(
                f"{folder}: the weights are not those that were saved: their checksum differs from config.json. The file is "
                f"corrupted or was replaced: download or copy it again. Load it with verify='none' to skip this check."
            )
        state = _in_load_dtype(state, weights, folder)
        assign_weights(model, state)
        if verify != "none":
            golden.check(model, values.get("golden"), str(folder), full=verify == "full")
        preprocess = _field(values, "preprocess", (dict, type(None)), folder)
        classes = _field(values, "classes", (list, type(None)), folder)
        task = _field(values, "task", str, folder)
        names = tuple(str(name) for name in classes) if classes is not None else None
        check_task(task, names, config.outputs)
        return NativeCheckpoint(
            model,
            archive,
            state,
            Preprocess.from_dict(preprocess) if preprocess is not None else None,
            names,
            task,
            _field(values, "provenance", dict, folder),
            report,
        )


def read_description(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the model's config and its provenance, without the weights."""
    values = read_json(folder / _CONFIG)
    _check_version(values, folder)
    return ModelConfig.from_dict(_field(values, "model", dict, folder)), _field(values, "provenance", dict, folder)


def assign_weights(model: Model, state: Mapping[str, Tensor]) -> Model:
    """Make these tensors the parameters of an empty model, without a copy."""
    model.load_state_dict(state, assign=True)
    fill_fixed_tables(model)
    return model.eval()


def write_shards(folder: Path, state: Mapping[str, Tensor], limit: int) -> list[str]:
    """Write `model.safetensors`, or several shards with an index in the Hub's layout; return the file names."""
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
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return names


def weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's weight files, from the index if there is one."""
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
        if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
            raise VitrailError(f"{folder / _INDEX} does not list safetensors files of this folder. Download or copy it again.")
        return names
    for name in (_MODEL, "pytorch_model.bin"):
        if (folder / name).is_file():
            return [name]
    raise VitrailError(f"{folder} has a config.json but no weights: copy {_MODEL} or pytorch_model.bin there.")


def merge(archives: Sequence[Archive], folder: Path) -> Archive:
    """Merge shards into one archive."""
    whole = Archive(folder if len(archives) > 1 else archives[0].path, archives[0].kind, {})
    for archive in archives:
        duplicates = whole.tensors.keys() & archive.tensors.keys()
        if duplicates:
            raise VitrailError(
                f"{archive.path} contains {min(duplicates)!r}, and so does another file of {folder}. Copy the folder again."
            )
        whole.tensors.update(archive.tensors)
        whole.notes += archive.notes
    return whole


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        return read_json_object(path)
    except ValueError as error:
        raise VitrailError(f"{path} is not a JSON object ({error}). It is corrupted: download or copy it again.") from error


def checksum(state: Mapping[str, Tensor]) -> str:
    """Compute a digest of names, shapes and the sums of all bit patterns, at memory bandwidth.

    Any single changed value changes it. SHA-256 detects every change, but takes several times as long.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        word = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}[tensor.element_size()]
        bits = tensor.view(word[0]).numpy().reshape(-1).view(word[1])
        total = int(np.add.reduce(bits, dtype=word[1]))
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total}\n".encode())
    return digest.hexdigest()[:32]


def check_replaceable(target: Path) -> None:
    """Raise an error if the target exists and is anything but a checkpoint."""
    if not target.exists():
        return
    if not target.is_dir():
        raise VitrailError(f"{target} is a file, but a checkpoint is a folder. Choose another name.")
    inside = [item.name for item in target.iterdir()]
    others = [
        name
        for name in inside
        if name not in _CHECKPOINT_FILES and not (name.startswith("model") and name.endswith(".safetensors"))
    ]
    if others or (inside and _CONFIG not in inside):
        raise VitrailError(
            f"{target} exists and contains other files than a checkpoint ({', '.join(sorted(others or inside)[:4])}). "
            f"It is not changed: choose another folder."
        )


def _unwrapped_state(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    while not hasattr(model, "config"):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            swapped = isinstance(model, str | os.PathLike)
            hint = (
                "The folder comes first: vitrail.save(folder, model)."
                if swapped
                else "Save the state dict of others with torch.save."
            )
            kind = type(model).__name__
            raise VitrailError(f"Cannot save a model of type {kind}: only Vitrail's models, wrapped or not, have a config. {hint}")
        model = inner
    state = {}
    for name, tensor in merged_state(model, model.state_dict()).items():
        plain = name.replace("_orig_mod.", "").removeprefix("module.")
        state[plain] = tensor.detach().cpu().contiguous()
        if not torch.isfinite(state[plain]).all():
            raise VitrailError(
                f"{plain} contains values that are not finite (NaN or infinite): the training diverged. Nothing was saved."
            )
    return model, state


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rounded(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert the weights to the dtype they are stored in; raise an error if one is too large for it."""
    if dtype not in FLOATS:
        raise VitrailError(f"Weights cannot be stored as {dtype}. Use one of {', '.join(map(_dtype_name, FLOATS))}.")
    rounded = {name: tensor.to(dtype) for name, tensor in state.items()}
    too_large = next((name for name, tensor in rounded.items() if not torch.isfinite(tensor).all()), None)
    if too_large is not None:
        raise VitrailError(f"{too_large} has values that are too large for {_dtype_name(dtype)}. Store the weights as bfloat16.")
    return rounded


def _in_load_dtype(state: dict[str, Tensor], weights: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Convert weights from the dtype they are stored in to the one they are loaded in, if config.json names one."""
    if "load_dtype" not in weights:
        return state
    dtypes = {_dtype_name(dtype): dtype for dtype in FLOATS}
    name = weights["load_dtype"]
    if name not in dtypes:
        raise VitrailError(f"{folder / _CONFIG}: load_dtype is {name!r}; it must be one of {', '.join(dtypes)}. Copy it again.")
    return {key: tensor.to(dtypes[name]) for key, tensor in state.items()}


def check_task(task: str, classes: Sequence[str] | None, outputs: int) -> None:
    """Raise an error for an unknown task or a wrong number of class names."""
    if task not in TASKS:
        raise VitrailError(f"The task is {task!r}; it must be one of {', '.join(TASKS)}.")
    if classes is not None and len(classes) != outputs:
        raise VitrailError(
            f"The model has {counted(outputs, 'output')}, but the list of classes has {counted(len(classes), 'name')}. "
            f"Give one name per output."
        )


def _check_version(values: Mapping[str, Any], folder: Path) -> None:
    version = values.get("version")
    if values.get("format") != "vitrail" or not isinstance(version, int):
        raise VitrailError(
            f"{folder / _CONFIG} is not the config of a Vitrail checkpoint. Give a folder that `vitrail.save` or a run has "
            "written, or the weight file itself."
        )
    if version > VERSION:
        raise VitrailError(
            f"{folder} has format version {version}, but this Vitrail reads versions up to {VERSION}. Update Vitrail to load it."
        )


def _field(values: Mapping[str, Any], name: str, kind: Any, folder: Path) -> Any:
    if name not in values or not isinstance(values[name], kind):
        raise VitrailError(f"{folder / _CONFIG}: {name!r} is missing or has a wrong type. The file is corrupted: copy it again.")
    return values[name]


def _check_sha256(folder: Path, files: Sequence[str], weights: Mapping[str, Any]) -> None:
    stored = weights.get("sha256")
    for name in files:
        expected = stored.get(name) if isinstance(stored, dict) else None
        found = sha256(folder / name)
        if found != expected:
            raise VitrailError(
                f"{folder / name} has SHA-256 {found}, but config.json says {expected or 'nothing'}. Download or copy it again."
            )


def _json(values: Mapping[str, Any], target: Path) -> str:
    try:
        return to_json(values, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise VitrailError(f"{target}: provenance and class names must be plain JSON values ({error}).") from error
