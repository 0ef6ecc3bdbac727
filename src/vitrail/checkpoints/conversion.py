"""Write a loaded model in any format, and verify that it reads back bit for bit before the target is created."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import native
from vitrail.checkpoints.archive import wrap_errors, write_npz
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.format import Format
from vitrail.checkpoints.formats import FORMATS
from vitrail.checkpoints.huggingface import config_json
from vitrail.checkpoints.loading import Found, load, locate, read_foreign
from vitrail.checkpoints.mapping import rows_of, unmapped, write_state
from vitrail.checkpoints.preprocess_configs import to_hugging_face, to_timm
from vitrail.checkpoints.report import Report
from vitrail.checkpoints.timm_config import timm_config
from vitrail.errors import VitrailError, did_you_mean
from vitrail.files import atomic_file, atomic_folder, sha256
from vitrail.models import ViTConfig
from vitrail.text import to_json
from vitrail.version import __version__

NAMES = ("vitrail", *FORMATS)


def convert(
    source: str | os.PathLike[str], target: str | os.PathLike[str], to: str = "vitrail", **options: Any
) -> tuple[Bundle, Report]:
    """Load a checkpoint (with the options of `load`) and write it in another format; return the bundle and the writing report."""
    find_format(to)
    bundle = load(source, **options)
    found = locate(source)
    origin = {"source": Path(found.name).name if found.kind == "file" else found.name, "format": bundle.report.format}
    if found.kind == "file":
        origin["sha256"] = sha256(found.path)
    if bundle.classes_assumed:  # stored, they would no longer be a guess
        bundle.classes, bundle.classes_assumed = None, False
    bundle.provenance = {**bundle.provenance, **origin, "converted_by": f"vitrail {__version__}"}
    return bundle, write(bundle, target, to)


def write(bundle: Bundle, target: str | os.PathLike[str], to: str = "vitrail") -> Report:
    """Write a bundle in a format. The result is read back and compared before the target is created."""
    fmt, path = find_format(to), Path(target)
    report = Report(str(path), to)
    if fmt is None:
        details = {"classes": bundle.classes, "task": bundle.task, "provenance": bundle.provenance}
        native.save(path, bundle.model, preprocess=bundle.preprocess, read_back=True, **details)  # type: ignore[arg-type]
        report.parameters = sum(tensor.numel() for tensor in bundle.model.state_dict().values())
        return report
    tensors = _tensors(bundle, fmt, report)
    with _temporary(path, fmt) as temporary, wrap_errors(path):
        _write(temporary, tensors, bundle, fmt, report, target=path)
        _read_back(temporary, bundle, path)
        stores_config = fmt.name == "timm" and temporary.is_dir()
        stored = load(temporary, verify="none").model.config if stores_config else None
        report.notes += fmt.unstored_numerics(bundle.model.config, stored)
    return report


def find_format(name: str) -> Format | None:
    """Return the format with this name; None is Vitrail's own."""
    if name not in NAMES:
        raise VitrailError(f"There is no format {name!r}.{did_you_mean(name, NAMES)} Use one of {', '.join(NAMES)}.")
    return FORMATS.get(name)


def _tensors(bundle: Bundle, fmt: Format, report: Report) -> dict[str, Tensor]:
    model = bundle.model
    fmt.check_writable(model.config)
    rows = rows_of(fmt.rows(model.config), model)
    missing = unmapped(rows, model)
    if missing:
        raise VitrailError(f"{fmt.title} cannot store {', '.join(missing[:6])}. The vitrail format can store every model.")
    if fmt.name == "hf" and isinstance(model.config, ViTConfig) and model.config.pre_logits and model.config.outputs:
        raise VitrailError(
            "Hugging Face's ViTForImageClassification has no pre-logits layer, so its logits would differ. "
            "Convert with outputs=0 to a ViTModel, where it becomes the pooler, or fine-tune without it."
        )
    return write_state(model.state_dict(), rows, report)


@contextmanager
def _temporary(path: Path, fmt: Format) -> Iterator[Path]:
    """Yield a temporary file or folder that is renamed to the target only if writing succeeds."""
    if fmt.container == "folder" or (fmt.name == "timm" and not path.suffix):
        native.check_replaceable(path)
        with atomic_folder(path) as temporary:
            yield temporary
        return
    suffixes = (".npz",) if fmt.container == "npz" else (".safetensors", ".pth")
    if path.suffix not in suffixes:
        raise VitrailError(f"{path} must end in {' or '.join(suffixes)} for the format of {fmt.title}.")
    if path.is_dir():
        raise VitrailError(f"{path} is a folder; give a file name.")
    with atomic_file(path) as temporary:
        yield temporary


def _write(path: Path, tensors: Mapping[str, Tensor], bundle: Bundle, fmt: Format, report: Report, *, target: Path) -> None:
    if fmt.container == "npz":
        start = "params/" if fmt.name == "big-vision" else ""
        write_npz(path, {f"{start}{name}": tensor for name, tensor in tensors.items()})
    elif path.is_dir():
        _write_folder(path, tensors, bundle, fmt, report)
    elif target.suffix == ".pth":
        torch.save(dict(tensors), path)
    else:
        from safetensors.torch import save_file

        save_file(dict(tensors), path, metadata={"format": "pt"})


def _write_folder(path: Path, tensors: Mapping[str, Tensor], bundle: Bundle, fmt: Format, report: Report) -> None:
    config, files = bundle.model.config, {}
    dtype = str(bundle.model.norm.weight.dtype).removeprefix("torch.")
    if fmt.name == "hf":
        assert isinstance(config, ViTConfig)
        start = "vit." if config.outputs else ""
        tensors = {name if name.startswith("classifier.") else f"{start}{name}": tensor for name, tensor in tensors.items()}
        files["config.json"] = config_json(config, bundle.classes, dtype)
        if bundle.preprocess:
            files["preprocessor_config.json"] = to_hugging_face(bundle.preprocess)
    else:
        preprocess = to_timm(bundle.preprocess) if bundle.preprocess else {}
        files["config.json"] = timm_config(config, preprocess, bundle.classes)
    if bundle.preprocess and (not bundle.preprocess.antialias or bundle.preprocess.rounding != "nearest"):
        report.notes.append(
            "this format cannot store TensorFlow's details of the preprocessing (no antialias, rounding): pixels differ slightly"
        )
    native.write_shards(path, tensors, native.SHARD_SIZE)
    for name, values in files.items():
        (path / name).write_text(to_json(values, indent=2) + "\n", encoding="utf-8")


def _read_back(path: Path, bundle: Bundle, target: Path) -> None:
    config = bundle.model.config
    fields: dict[str, Any] = {"grid": config.grid}
    if isinstance(config, ViTConfig):
        fields["heads"] = config.heads
        if config.prefix and config.position == "learned":
            fields["position_prefix"] = config.position_prefix
    values = native.read_json(path / "config.json") if path.is_dir() else None
    reloaded = read_foreign(Found(str(target), path, "folder" if path.is_dir() else "file", values), fields, ())
    ours, theirs = bundle.model.state_dict(), reloaded.model.state_dict()
    different = [name for name in ours if name not in theirs or not _same_bits(ours[name], theirs[name])]
    different += [name for name in theirs if name not in ours]
    if different:
        raise VitrailError(
            f"{target} did not read back as written ({', '.join(different[:4])}), so it was deleted. Check the disk."
        )


def _same_bits(one: Tensor, two: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = one.dtype == two.dtype and one.shape == two.shape
    return same and torch.equal(one.detach().cpu().view(integers), two.detach().cpu().view(integers))
