"""`vitrail.load`: load a checkpoint from a folder, a file or the Hub."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.checkpoints import adapt, hub, native, published, url
from vitrail.checkpoints.archive import Archive, open_archive, wrap_errors
from vitrail.checkpoints.bundle import Bundle, image_shape
from vitrail.checkpoints.class_names import known_classes, set_classes
from vitrail.checkpoints.download import shown_url
from vitrail.checkpoints.flax import strip_prefix
from vitrail.checkpoints.format import Format
from vitrail.checkpoints.formats import detect_format
from vitrail.checkpoints.huggingface_variants import check_model_type
from vitrail.checkpoints.infer_config import Hints, Shapes
from vitrail.checkpoints.mapping import empty_model_for, read_state, rows_of
from vitrail.checkpoints.prefixes import drop_tensors, find_model, strip_wrappers, take_part
from vitrail.checkpoints.preprocess_configs import from_hugging_face, from_timm
from vitrail.checkpoints.pretrained import pretrained_models
from vitrail.checkpoints.published import PublishedWeights
from vitrail.checkpoints.report import Report
from vitrail.data.preprocess import APPLY_EXIF, Preprocess, preset
from vitrail.errors import VitrailError, did_you_mean
from vitrail.files import restore_folder
from vitrail.models import ModelConfig
from vitrail.regular_files import special_kind

Verify = Literal["none", "quick", "full"]
_STORED_EXIF = f"stored{APPLY_EXIF}"


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
    """Load a model from a checkpoint folder, a run folder, an `.npz`, `.pth` or `.safetensors` file, or by a name.

    `ViT-B/16` and `ViT-B/16@mae` are published weights (`vitrail models --pretrained` lists them), `hf:owner/name` is any
    repository on the Hub. These and URLs are downloaded once. `vitrail-ti8-tiny-imagenet` is included in the package.

    Args:
        ref: The path or name. A path that exists is never a name. `file.npz:img` and `file.pth:model_ema` select a part of a file.
        outputs: Replace the head by a zero-initialised one with this many outputs (0: no head).
        image_size: Change the image size; position embeddings are resampled by the source library's rule.
        channels: Change the number of input channels; `stem` says how the first layer is adapted.
        stem: "sum", "repeat" or "random".
        preprocess: Replace the stored preprocessing, by a `Preprocess` or the name of a preset. "timm+exif" is a preset with
            the EXIF orientation applied, "stored+exif" the stored preprocessing with it.
        classes: Names of the outputs in order, if the file does not store them.
        device: The device to move the model to. Default: the CPU, with weights mapped from the file without a copy.
        dtype: Convert to this dtype. Default: the file's.
        drop: Patterns of tensor names to leave out, such as "decoder.*".
        verify: How to verify a Vitrail checkpoint. "quick": a checksum of all weights and a golden output of a few tokens;
            "full": also SHA-256 and the golden output of a whole image; "none": neither.
        fields: Fields of the model's config that the file does not store or that you want to change: `heads=8`,
            `grid=(7, 14)` for a position embedding that is not square, `gelu="tanh"`, `dropout=0.1`.
    """
    if verify not in ("none", "quick", "full"):
        raise VitrailError(f"verify is {verify!r}; it must be 'none', 'quick' or 'full'.")
    found = locate(ref)
    with wrap_errors(found.name):
        bundle = (
            _native(found, fields, drop, verify)
            if found.kind == "vitrail"
            else read_foreign(found, fields, drop, preprocessed=preprocess in (None, _STORED_EXIF), image_size=image_size)
        )
    if channels is not None:
        adapt.change_channels(bundle, channels, stem)
    if image_size is not None:
        adapt.change_size(bundle, image_size)
    if outputs is not None:
        adapt.change_outputs(bundle, outputs)
    if preprocess == _STORED_EXIF:
        bundle.preprocess = dataclasses.replace(bundle.stored_preprocess(), exif=True)
    elif preprocess is not None:
        bundle.preprocess = _checked(preprocess, bundle.model.config)
    if classes is not None:
        native.check_task(bundle.task, classes, bundle.model.config.outputs)
        set_classes(bundle, tuple(classes))
    if device is not None or dtype is not None:
        bundle.model.to(device=device, dtype=dtype)
    return bundle


@dataclass(frozen=True)
class Found:
    """What a reference points to: a folder with its config.json, or a single file."""

    name: str
    path: Path
    kind: Literal["vitrail", "folder", "file"]
    config: Mapping[str, Any] | None = None
    part: str | None = None
    published: PublishedWeights | None = None


def locate(ref: str | os.PathLike[str]) -> Found:
    """Find what a reference points to; download it first if it is a name or a URL."""
    name = os.fspath(ref)
    included = pretrained_models()
    if name in included:
        return _folder(name, included[name])
    if name.startswith("hf:"):
        return _folder(name, hub.download(name.removeprefix("hf:")))
    if url.is_url(name):
        return Found(shown_url(name), url.download(name), "file")
    path = Path(name).expanduser()
    with wrap_errors(name):
        restore_folder(path)
        if path.is_dir():
            return _folder(name, path)
        if path.is_file():
            config = path.parent / "config.json"
            if path.name in ("model.safetensors", "pytorch_model.bin") and config.is_file():
                return _folder(name, path.parent)
            return Found(name, path, "file")
        start, colon, part = name.rpartition(":")
        if colon and Path(start).expanduser().is_file():
            return Found(name, Path(start).expanduser(), "file", part=part)
    if special := special_kind(path):
        raise VitrailError(f"{name} is {special}, not a checkpoint. Give a folder or a regular file.")
    if (weights := published.find(name)) is not None:
        return _published(weights)
    hint = published.did_you_mean_published(name) or did_you_mean(name, [*included, *published.names()])
    raise VitrailError(
        f"There is no checkpoint {name!r}.{hint} Give a folder, an .npz, .pth or "
        f".safetensors file, a name of published weights such as ViT-B/16 (`vitrail models --pretrained` lists them), "
        f"hf:owner/name for the Hub, or the included model {' or '.join(included)}."
    )


def _published(weights: PublishedWeights) -> Found:
    if weights.repository is None:
        return Found(weights.reference, url.download(weights.source, label=weights.reference), "file", published=weights)
    folder = hub.download(weights.repository, label=weights.reference, cache_first=True)
    return dataclasses.replace(_folder(weights.reference, folder), published=weights)


def _folder(name: str, path: Path) -> Found:
    if (path / "config.json").is_file():
        config = native.read_json(path / "config.json")
        if config.get("format") == "vitrail":
            return Found(name, path, "vitrail", config)
        if "model_type" in config or "architecture" in config:
            return Found(name, path, "folder", config)
    if (path / "checkpoints").is_dir():
        restore_folder(path / "model")
    if (path / "model" / "config.json").is_file():  # a run folder
        return _folder(name, path / "model")
    if (path / "metrics.jsonl").exists() or (path / "checkpoints").is_dir():
        raise VitrailError(f"{name} is a run that has no model/ yet. Finish it first: run its training command again to resume.")
    inside = ", ".join(sorted(item.name for item in path.iterdir())[:8]) or "nothing"
    raise VitrailError(
        f"{name} is a folder without a checkpoint's config.json (it contains {inside}). "
        f"Checkpoint folders of Vitrail, Hugging Face's ViT and timm have one. For a single weight file, give the file itself."
    )


def _native(found: Found, fields: Mapping[str, Any], drop: Sequence[str], verify: Verify) -> Bundle:
    read = native.read(found.path, verify=verify, drop=drop)
    model, report = read.model, read.report
    report.source = found.name
    if fields:
        model = native.assign_weights(empty_model_for(model.config.replace(**fields), read.archive), read.state)
        report.notes.append(f"changed on loading: {', '.join(f'{key}={value!r}' for key, value in fields.items())}")
    return Bundle(model, read.preprocess, read.classes, read.task, report, read.provenance)


def read_foreign(
    found: Found,
    fields: Mapping[str, Any],
    drop: Sequence[str],
    *,
    preprocessed: bool = True,
    image_size: int | tuple[int, int] | None = None,
) -> Bundle:
    """Load a model from another library's file or folder, with its preprocessing unless another will replace it."""
    check_model_type(found.config or {})
    archive = _open(found)
    report = Report(found.name, "")
    if archive.kind == "npz":
        strip_prefix(archive, found.part, report)
    else:
        strip_wrappers(archive)
        if archive.prefix is not None:
            take_part(archive, archive.prefix, report)
    drop_tensors(archive, drop, report)
    if archive.kind != "npz":
        find_model(archive, report)
    fmt = detect_format(archive)
    report.format = fmt.name
    fmt.normalise_names(archive)
    hints = Hints(dict(fields), found.config, image_size=image_size)
    config = fmt.infer_config(Shapes(archive), hints)
    model = empty_model_for(config, archive)
    rows = rows_of(fmt.rows(config), model)
    state = read_state(archive, rows, model, report, ignored=fmt.ignored, drop=drop)
    native.assign_weights(model, state)
    report.notes += [*archive.notes, *hints.notes]
    report.assumptions += hints.assumptions
    preprocess = _preprocess(found, fmt, config, report) if preprocessed else None
    bundle = Bundle(model, preprocess, None, "classify", report, {"source": found.name, "format": fmt.name})
    known_classes(bundle, fmt.name, found.config or {}, found.path, found.published)
    if found.published is not None:
        about = {"weights": found.published.source, "paper": f"arXiv {found.published.paper}", "licence": found.published.licence}
        bundle.provenance |= about
    return bundle


def _open(found: Found) -> Archive:
    if found.kind == "file":
        return open_archive(found.path, found.part)
    return native.merge([open_archive(found.path / name) for name in native.weight_files(found.path)], found.path)


def _preprocess(found: Found, fmt: Format, config: ModelConfig, report: Report) -> Preprocess:
    size, channels = config.image_size, config.channels
    stored = None
    if fmt.name == "hf":
        file = found.path / "preprocessor_config.json" if found.kind == "folder" else None
        values = native.read_json(file) if file and file.is_file() else {}
        stored = from_hugging_face(values, size, channels)
        if not values:
            report.assumptions.append("no preprocessor_config.json next to the weights: assumed ViTImageProcessor's defaults")
    elif fmt.name == "timm" and found.config is not None:
        stored = from_timm(found.config, size, channels)
    if stored is None:
        stored = preset(fmt.preset, size=size, channels=channels)
        report.assumptions.append(
            f"the file does not store its preprocessing: assumed {fmt.preset!r}; change it with preprocess= (--preprocess)"
        )
    if stored.size != size:
        report.notes.append(f"the stored preprocessing has size {stored.size}, the model {size}: changed to the model's")
        stored = stored.with_size(size)
    return stored


def _checked(preprocess: Preprocess | str, config: ModelConfig) -> Preprocess:
    if isinstance(preprocess, str):
        return preset(preprocess, size=config.image_size, channels=config.channels)
    if preprocess.size != config.image_size or preprocess.channels != config.channels:
        raise VitrailError(
            f"The preprocessing makes images of {image_shape(preprocess.size, preprocess.channels)}, but the model takes "
            f"{image_shape(config.image_size, config.channels)}. Pass one that fits, or the name of a preset, such as 'imagenet'."
        )
    return preprocess
