"""Export a model: write it under a temporary name, compare it with the PyTorch model, keep it only if they agree."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints import Bundle
from vitrail.errors import VitrailError, counted
from vitrail.export.artefact import FILES, REPORT, Artefact
from vitrail.export.blocks import block_errors, describe
from vitrail.export.metadata import metadata_of
from vitrail.export.module import Exported, exported_module
from vitrail.export.onnx_file import need_onnx, write_onnx
from vitrail.export.quantise import quantise
from vitrail.export.settings import MAX_DROP, ExportSettings
from vitrail.export.verify import SAMPLE_NAME, THRESHOLDS, Comparison, batched, compare, sample_photos
from vitrail.files import atomic_folder
from vitrail.regular_files import utf8_path
from vitrail.text import to_json

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}


def export_model(
    bundle: Bundle,
    out: str | Path,
    settings: ExportSettings = ExportSettings(),  # noqa: B008 - it is frozen
    *,
    images: Sequence[Any] | None = None,
    labels: Sequence[int] | None = None,
    data: str | None = None,
    calibrate: Sequence[Any] = (),
    max_drop: float | None = MAX_DROP,
    force: bool = False,
) -> Comparison:
    """Write a folder with the model and `report.json`, and return how it differs from the PyTorch model.

    It is compared on `images` (paths, bytes, arrays or Pillow images, described by `data`; `labels` are numbers of outputs).
    If it differs more than its precision explains, or loses more accuracy than `max_drop` (a fraction; where labels are given),
    nothing is written and an error says so, unless `force` is given.
    `calibrate` are images to measure the ranges of activations with, for int8.
    """
    target = Path(out)
    check_target(target)
    if settings.format == "onnx":
        need_onnx()
    bundle.check_head()
    if calibrate and settings.precision != "int8":
        raise VitrailError(f"Images to calibrate with have no effect on {settings.precision}. Leave them out, or choose int8.")
    preprocess = bundle.stored_preprocess()
    size = settings.image_size or preprocess.size
    if settings.image_size is not None or size != bundle.model.config.image_size:  # the latter of a ResNet, which accepts several
        preprocess = preprocess.with_size(size)
        resized = exported_module(bundle.model, torch.float32, image_size=size).model
        bundle = dataclasses.replace(bundle, model=resized, preprocess=preprocess)  # type: ignore[arg-type]
    module = exported_module(bundle.model, _TYPES[settings.precision], input=settings.input, preprocess=preprocess)
    photos = sample_photos(channels=preprocess.channels, rectangles=settings.resize_in_graph) if images is None else []
    given, named = (photos, SAMPLE_NAME) if images is None else (images, data or "your data")
    metadata = metadata_of(bundle, settings, str(module.input_type).removeprefix("torch."))
    with atomic_folder(target) as new, utf8_path(new) as name:
        folder = Path(name)
        file = folder / FILES[settings.format]
        _write(module, file, bundle, settings, metadata, calibrate)
        artefact = Artefact.open(file)
        comparison = compare(bundle, artefact, given, labels, data=named)
        problems = comparison.problems(settings.precision, max_drop)
        blocks = block_errors(bundle, artefact, given) if problems else None
        if blocks is not None and not force:
            raise VitrailError(
                f"The exported model does not compute what the PyTorch model does, so it was not written: {'; '.join(problems)} "
                f"({counted(comparison.images, 'image')} of {named}). {describe(blocks, settings.precision)} "
                "--force writes it all the same."
            )
        limits = {**dataclasses.asdict(THRESHOLDS[settings.precision]), "max_drop": max_drop}
        outcome = {"limits": limits, "problems": problems, "forced": bool(problems), "blocks": blocks}
        report = {**metadata, "comparison": dataclasses.asdict(comparison), **outcome}
        (folder / REPORT).write_text(to_json(report, indent=2) + "\n", encoding="utf-8")
    return comparison


_FILES = {*FILES.values(), REPORT, "model.onnx.data"}


def check_target(target: Path) -> None:
    """Raise an error if the target has the name of a file, or exists and is anything but an exported model."""
    if target.suffix.lower() in (".onnx", ".pt2") and not target.exists():
        raise VitrailError(
            f"The target is a folder, but {target} is the name of a file. Give a folder such as {target.with_suffix('')}; "
            f"model{target.suffix.lower()} is written into it."
        )
    if target.exists() and not (target.is_dir() and all(path.name in _FILES for path in target.iterdir())):
        raise VitrailError(f"{target} exists and is not an exported model; give a new folder.")


def _write(
    module: Exported, file: Path, bundle: Bundle, settings: ExportSettings, metadata: dict[str, Any], calibrate: Sequence[Any]
) -> None:
    config = bundle.model.config
    example = module.example(2, config.image_size, config.channels)
    if settings.format == "pt2":
        program = torch.export.export(module, (example,), dynamic_shapes=module.dynamic_shapes)
        content = io.BytesIO()  # its writer of files aborts the process if the disk is full
        torch.export.save(program, content, extra_files={"vitrail.json": json.dumps(metadata)})
        file.write_bytes(content.getbuffer())
        return
    if settings.precision != "int8":
        write_onnx(module, example, file, opset=settings.opset, metadata=metadata)
        return
    exact = file.with_name("float.onnx")
    write_onnx(module, example, exact, opset=settings.opset, metadata=metadata)
    source = Artefact.open(exact)
    quantise(exact, file, [batch for images in batched(calibrate) for _, batch in source.batches(images)])
    for path in file.parent.glob("float.onnx*"):
        path.unlink()
