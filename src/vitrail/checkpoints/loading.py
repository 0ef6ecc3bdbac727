"""`vitrail.load`: from any reference to a bundle."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.checkpoints import adapt, hub, native
from vitrail.checkpoints.archive import Archive, damage_named, open_archive
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.flax import strip_prefix
from vitrail.checkpoints.foreign_preprocess import from_hugging_face, from_timm
from vitrail.checkpoints.format import Format
from vitrail.checkpoints.formats import recognise
from vitrail.checkpoints.huggingface import label_names
from vitrail.checkpoints.infer import Hints, Shapes
from vitrail.checkpoints.mapping import present, read_state, rename
from vitrail.checkpoints.report import Report
from vitrail.data.preprocess import Preprocess, preset
from vitrail.errors import VitrailError
from vitrail.models import ModelConfig, empty_model

Verify = Literal["none", "quick", "full"]
_WRAPPED = [(r"^(?:module\.|_orig_mod\.)+", ""), (r"\._orig_mod\.", ".")]


def load(
    ref: str | os.PathLike[str],
    *,
    outputs: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    stem: adapt.Stem | None = None,
    preprocess: Preprocess | str | None = None,
    classes: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    drop: Sequence[str] = (),
    verify: Verify = "quick",
    **fields: Any,
) -> Bundle:
    """A model from a checkpoint folder, a run folder, an `.npz`, `.pth` or `.safetensors` file, or `hf:owner/name`.

    Args:
        ref: Where it is. `file.npz:img` and `file.pth:model_ema` name a part of a file.
        outputs: Put on a new head of zeros with so many outputs (0: none).
        image_size: Take images of this size; positions are resampled by the source's own rule.
        channels: Take images of so many channels; `stem` says how the first layer is made from the old one.
        stem: "sum", "repeat" or "random".
        preprocess: Replace the recorded preprocessing, by a value or a preset's name.
        classes: Names of the outputs in order, where the file does not say them.
        device: Where to put the model; the CPU by default, straight from the file without a copy.
        dtype: Convert to this precision; by default the file's own.
        drop: Patterns of tensor names that may be left out, such as "decoder.*".
        verify: Of a Vitrail checkpoint, "quick" compares a checksum of all weights and a golden output of a few tokens, "full"
            also SHA-256 and the golden output of a whole image, "none" neither.
        fields: Fields of the model's configuration that the file cannot say or that you want otherwise: `heads=8`,
            `grid=(7, 14)` for a position table that is no square, `gelu="tanh"`, `dropout=0.1`.
    """
    if verify not in ("none", "quick", "full"):
        raise VitrailError(f"verify is {verify!r}; it can be 'none', 'quick' or 'full'.")
    found = locate(ref)
    with damage_named(found.name):
        bundle = _native(found, fields, drop, verify) if found.kind == "vitrail" else read_foreign(found, fields, drop)
    if channels is not None:
        adapt.change_channels(bundle, channels, stem)
    if image_size is not None:
        adapt.change_size(bundle, image_size)
    if outputs is not None:
        adapt.change_outputs(bundle, outputs)
    if preprocess is not None:
        bundle.preprocess = _given(preprocess, bundle.model.config)
    if classes is not None:
        native.check_task(bundle.task, classes, bundle.model.config.outputs)
        bundle.classes = tuple(classes)
    if device is not None or dtype is not None:
        bundle.model.to(device=device, dtype=dtype)
    return bundle


@dataclass(frozen=True)
class Found:
    """What a reference stands for: a folder with its config.json, or a bare file."""

    name: str
    path: Path
    kind: Literal["vitrail", "folder", "file"]
    config: Mapping[str, Any] | None = None
    part: str | None = None


def locate(ref: str | os.PathLike[str]) -> Found:
    name = os.fspath(ref)
    if name.startswith("hf:"):
        return _folder(name, hub.fetch(name.removeprefix("hf:")))
    path = Path(name).expanduser()
    with damage_named(name):
        if path.is_dir():
            return _folder(name, path)
        if path.is_file():
            beside = path.parent / "config.json"
            if path.name in ("model.safetensors", "pytorch_model.bin") and beside.is_file():
                return _folder(name, path.parent)
            return Found(name, path, "file")
        start, colon, part = name.rpartition(":")
        if colon and Path(start).expanduser().is_file():
            return Found(name, Path(start).expanduser(), "file", part=part)
    raise VitrailError(
        f"There is no checkpoint {name!r}. "
        f"A reference is a folder, an .npz, .pth or .safetensors file, or hf:owner/name for the hub."
    )


def _folder(name: str, path: Path) -> Found:
    if (path / "config.json").is_file():
        config = native.read_json(path / "config.json")
        if config.get("format") == "vitrail":
            return Found(name, path, "vitrail", config)
        if "model_type" in config or "architecture" in config:
            return Found(name, path, "folder", config)
    if (path / "model" / "config.json").is_file():  # the folder of a training run
        return _folder(name, path / "model")
    inside = ", ".join(sorted(item.name for item in path.iterdir())[:8]) or "nothing"
    raise VitrailError(
        f"{name} is a folder without a checkpoint's config.json (it holds {inside}). "
        f"A checkpoint folder of Vitrail, of Hugging Face's ViT or of timm has one; a single weight file is named itself."
    )


def _native(found: Found, fields: Mapping[str, Any], drop: Sequence[str], verify: Verify) -> Bundle:
    read = native.read(found.path, verify=verify, drop=drop)
    model, report = read.model, read.report
    report.source = found.name
    if fields:
        model = native.fill(empty_model(model.config.replace(**fields)), read.state)
        report.notes.append(f"changed on loading: {', '.join(f'{key}={value!r}' for key, value in fields.items())}")
    return Bundle(model, read.preprocess, read.classes, read.task, report, read.provenance)


def read_foreign(found: Found, fields: Mapping[str, Any], drop: Sequence[str]) -> Bundle:
    """A model from another code base's file or folder."""
    archive = _open(found)
    report = Report(found.name, "")
    if archive.kind == "npz":
        strip_prefix(archive, found.part, report)
    else:
        rename(archive, _WRAPPED, "prefixes 'module.' and '_orig_mod.', left by a wrapper, were stripped")
    known = recognise(archive)
    report.format = known.name
    known.respell(archive)
    hints = Hints(dict(fields), found.config)
    config = known.infer(Shapes(archive), hints)
    model = empty_model(config)
    rows = present(known.table(config), model)
    state = read_state(archive, rows, model, report, ignored=known.ignored, drop=drop)
    native.fill(model, state)
    report.notes += [*archive.notes, *hints.notes]
    preprocess = _preprocess(found, known, config, report)
    classes = _classes(found, known, config)
    return Bundle(model, preprocess, classes, "classify", report, {"source": found.name, "format": known.name})


def _open(found: Found) -> Archive:
    if found.kind == "file":
        return open_archive(found.path, found.part)
    return native.joined([open_archive(found.path / name) for name in native.weight_files(found.path)], found.path)


def _preprocess(found: Found, known: Format, config: ModelConfig, report: Report) -> Preprocess:
    size, channels = config.image_size, config.channels
    recorded = None
    if known.name == "hf":
        beside = found.path / "preprocessor_config.json" if found.kind == "folder" else None
        said = native.read_json(beside) if beside and beside.is_file() else {}
        recorded = from_hugging_face(said, size, channels)
        if not said:
            report.notes.append("no preprocessor_config.json beside the weights: that of ViTImageProcessor assumed")
    elif known.name == "timm" and found.config is not None:
        recorded = from_timm(found.config, size, channels)
    if recorded is None:
        recorded = preset(known.preset, size=size, channels=channels)
        report.notes.append(f"the file does not say its preprocessing: {known.preset!r} assumed; preprocess= changes it")
    if recorded.size != size:
        report.notes.append(f"the recorded preprocessing gives {recorded.size}, the model takes {size}: brought to the model's")
        recorded = recorded.with_size(size)
    return recorded


def _classes(found: Found, known: Format, config: ModelConfig) -> tuple[str, ...] | None:
    said = found.config or {}
    if known.name == "hf" and config.outputs:
        return label_names(said)
    names = said.get("label_names") if known.name == "timm" else None
    if isinstance(names, list) and len(names) == config.outputs:
        return tuple(str(name) for name in names)
    return None


def _given(preprocess: Preprocess | str, config: ModelConfig) -> Preprocess:
    if isinstance(preprocess, str):
        return preset(preprocess, size=config.image_size, channels=config.channels)
    if preprocess.size != config.image_size or preprocess.channels != config.channels:
        raise VitrailError(
            f"The preprocessing gives {preprocess.channels} channels of {preprocess.size}; "
            f"the model takes {config.channels} of {config.image_size}."
        )
    return preprocess
