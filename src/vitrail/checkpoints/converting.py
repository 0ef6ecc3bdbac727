"""Writing a loaded model in any format, and proving before it gets its name that it reads back bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import native
from vitrail.checkpoints.archive import damage_named, write_npz
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.foreign_preprocess import to_hugging_face, to_timm
from vitrail.checkpoints.format import Format
from vitrail.checkpoints.formats import FORMATS
from vitrail.checkpoints.huggingface import config_json
from vitrail.checkpoints.loading import Found, load, locate, read_foreign
from vitrail.checkpoints.mapping import present, uncovered, write_state
from vitrail.checkpoints.report import Report
from vitrail.checkpoints.timm_names import timm_config
from vitrail.errors import VitrailError, did_you_mean
from vitrail.files import atomic_file, atomic_folder
from vitrail.models import ViTConfig

NAMES = ("vitrail", *FORMATS)


def convert(
    source: str | os.PathLike[str], target: str | os.PathLike[str], to: str = "vitrail", **options: Any
) -> tuple[Bundle, Report]:
    """Read a checkpoint (with the options of `load`) and write it in a format; returns what was read, and the writing's report."""
    format_named(to)
    bundle = load(source, **options)
    found = locate(source)
    origin = {"source": Path(found.name).name if found.kind == "file" else found.name, "format": bundle.report.format}
    if found.kind == "file":
        origin["sha256"] = native.sha256(found.path)
    bundle.provenance = {**bundle.provenance, **origin, "converted_by": f"vitrail {version('vitrail')}"}
    return bundle, write(bundle, target, to)


def write(bundle: Bundle, target: str | os.PathLike[str], to: str = "vitrail") -> Report:
    """Write a bundle in a format. What was written is read back and compared before it takes its name."""
    known, path = format_named(to), Path(target)
    report = Report(str(path), to)
    if known is None:
        details = {"classes": bundle.classes, "task": bundle.task, "provenance": bundle.provenance}
        native.save(path, bundle.model, preprocess=bundle.preprocess, read_back=True, **details)  # type: ignore[arg-type]
        report.parameters = sum(tensor.numel() for tensor in bundle.model.state_dict().values())
        return report
    tensors = _tensors(bundle, known, report)
    with _place(path, known) as temporary, damage_named(path):
        _write(temporary, tensors, bundle, known, report, named=path)
        _read_back(temporary, bundle, path)
    return report


def format_named(name: str) -> Format | None:
    """The format of a name; None is our own."""
    if name not in NAMES:
        raise VitrailError(f"There is no format {name!r}.{did_you_mean(name, NAMES)} Known are {', '.join(NAMES)}.")
    return FORMATS.get(name)


def _tensors(bundle: Bundle, known: Format, report: Report) -> dict[str, Tensor]:
    model = bundle.model
    known.check_writable(model.config)
    rows = present(known.table(model.config), model)
    homeless = uncovered(rows, model)
    if homeless:
        raise VitrailError(f"{known.title} has no place for {', '.join(homeless[:6])}. The vitrail format holds every model.")
    if known.name == "hf" and isinstance(model.config, ViTConfig) and model.config.pre_logits and model.config.outputs:
        raise VitrailError(
            "Hugging Face's ViTForImageClassification has no pre-logits layer, so its logits would differ. "
            "Convert with outputs=0 for a ViTModel whose pooler it becomes, or fine-tune without it."
        )
    report.notes += known.unsaid(model.config)
    return write_state(model.state_dict(), rows, report)


@contextmanager
def _place(path: Path, known: Format) -> Iterator[Path]:
    """A temporary file or folder that takes the target's name only if all goes well."""
    if known.container == "folder" or (known.name == "timm" and not path.suffix):
        native.check_replaceable(path)
        with atomic_folder(path) as temporary:
            yield temporary
        return
    wanted = (".npz",) if known.container == "npz" else (".safetensors", ".pth")
    if path.suffix not in wanted:
        raise VitrailError(f"{path} should end in {' or '.join(wanted)}: that is what {known.title} files are.")
    if path.is_dir():
        raise VitrailError(f"{path} is a folder; give the file to write.")
    with atomic_file(path) as temporary:
        yield temporary


def _write(path: Path, tensors: Mapping[str, Tensor], bundle: Bundle, known: Format, report: Report, *, named: Path) -> None:
    if known.container == "npz":
        start = "params/" if known.name == "big-vision" else ""
        write_npz(path, {f"{start}{name}": tensor for name, tensor in tensors.items()})
    elif path.is_dir():
        _write_folder(path, tensors, bundle, known, report)
    elif named.suffix == ".pth":
        torch.save(dict(tensors), path)
    else:
        from safetensors.torch import save_file

        save_file(dict(tensors), path, metadata={"format": "pt"})


def _write_folder(path: Path, tensors: Mapping[str, Tensor], bundle: Bundle, known: Format, report: Report) -> None:
    config, files = bundle.model.config, {}
    dtype = str(bundle.model.norm.weight.dtype).removeprefix("torch.")
    if known.name == "hf":
        assert isinstance(config, ViTConfig)
        start = "vit." if config.outputs else ""
        tensors = {name if name.startswith("classifier.") else f"{start}{name}": tensor for name, tensor in tensors.items()}
        files["config.json"] = config_json(config, bundle.classes, dtype)
        if bundle.preprocess:
            files["preprocessor_config.json"] = to_hugging_face(bundle.preprocess)
    else:
        recorded = to_timm(bundle.preprocess) if bundle.preprocess else {}
        files["config.json"] = timm_config(config, recorded, bundle.classes)
    if bundle.preprocess and (not bundle.preprocess.antialias or bundle.preprocess.rounding != "nearest"):
        report.notes.append(
            "the preprocessing's TensorFlow details (no antialias, rounding) have no words there: pixels differ slightly"
        )
    native.write_shards(path, tensors, native.SHARD_SIZE)
    for name, values in files.items():
        (path / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_back(path: Path, bundle: Bundle, named: Path) -> None:
    config = bundle.model.config
    fields: dict[str, Any] = {"grid": config.grid}
    if isinstance(config, ViTConfig):
        fields["heads"] = config.heads
        if config.prefix and config.position == "learned":
            fields["position_prefix"] = config.position_prefix
    described = native.read_json(path / "config.json") if path.is_dir() else None
    again = read_foreign(Found(str(named), path, "folder" if path.is_dir() else "file", described), fields, ())
    ours, theirs = bundle.model.state_dict(), again.model.state_dict()
    different = [name for name in ours if name not in theirs or not _same_bits(ours[name], theirs[name])]
    if different or len(ours) != len(theirs):
        raise VitrailError(
            f"{named} did not read back as it was written ({', '.join(different[:4])}); it was not kept. Is the disk sound?"
        )


def _same_bits(one: Tensor, two: Tensor) -> bool:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = one.dtype == two.dtype and one.shape == two.shape
    return same and torch.equal(one.detach().cpu().view(words), two.detach().cpu().view(words))
