"""Find the model inside a training checkpoint: strip wrappers' prefixes, and take the part whose names match a format."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from vitrail.checkpoints.archive import Archive
from vitrail.checkpoints.formats import FORMATS
from vitrail.checkpoints.mapping import rename
from vitrail.checkpoints.report import Report
from vitrail.errors import VitrailError, counted

_WRAPPERS = r"(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
# What training code calls its model, or the part of it that is a ViT.
_WORDS = (
    "model net network backbone encoder visual vit trunk student teacher ema ema_model model_ema base_encoder momentum_encoder "
    "image_encoder vision_encoder feature_extractor target_encoder"
)
_PREFIX = re.compile(rf"(?:(?:{'|'.join(_WORDS.split())})\.)+")


def strip_wrappers(archive: Archive) -> None:
    """Strip what DDP, FSDP and torch.compile put into names."""
    changes = [(rf"^(?:{_WRAPPERS})+|(?<=\.)(?:{_WRAPPERS})+", "")]
    rename(archive, changes, "prefixes of DDP, FSDP and torch.compile (such as 'module.') were stripped")


def drop_tensors(archive: Archive, patterns: Sequence[str], report: Report) -> None:
    """Leave out the tensors that the user named, before the format is detected."""
    for name in list(archive.tensors):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            del archive.tensors[name]
            report.dropped.append((name, "dropped by the user"))


def take_part(archive: Archive, part: str, report: Report) -> None:
    """Keep the tensors under a prefix that the user named, as in `file.ckpt:model.backbone`."""
    prefix = part.removesuffix(".") + "."
    if not any(name.startswith(prefix) for name in archive.tensors):
        tops = sorted({name.split(".")[0] for name in archive.tensors})
        raise VitrailError(f"{archive.path} has no part {part!r}, and no names that start so; it has {', '.join(tops[:12])}.")
    _keep(archive, prefix, report)


def find_model(archive: Archive, report: Report) -> None:
    """If no format has these names, take the one prefix under which a format has them."""
    if _matches(archive.tensors.keys()):
        return
    found = []
    for prefix in sorted(
        {match[0][: dot + 1] for name in archive.tensors if (match := _PREFIX.match(name)) for dot in _dots(match[0])}
    ):
        if _matches({name.removeprefix(prefix) for name in archive.tensors if name.startswith(prefix)}):
            found.append(prefix)
    # A reader may know the names with and without an inner prefix: `model.vit.` is then part of the model under `model.`.
    found = [prefix for prefix in found if not any(prefix.startswith(other) for other in found if other != prefix)]
    if len(found) > 1:
        raise VitrailError(
            f"{archive.path} contains several models: {', '.join(prefix.rstrip('.') for prefix in found)}. "
            f"Choose one, such as {archive.path}:{found[0].rstrip('.')}."
        )
    if found:
        outside = _keep(archive, found[0], report)
        if outside:
            report.assumptions.append(
                f"the model is what is named {found[0]}…; left out: {counted(len(outside), 'other tensor')}, such as {outside[0]}"
            )


def _dots(prefix: str) -> list[int]:
    return [index for index, letter in enumerate(prefix) if letter == "."]


def _matches(names: object) -> bool:
    return any(fmt.matches(names) for fmt in FORMATS.values())  # type: ignore[arg-type]


def _keep(archive: Archive, prefix: str, report: Report) -> list[str]:
    outside = [name for name in archive.tensors if not name.startswith(prefix)]
    report.dropped += [(name, f"outside {prefix!r}: another part of the checkpoint") for name in outside]
    archive.tensors = {name.removeprefix(prefix): tensor for name, tensor in archive.tensors.items() if name.startswith(prefix)}
    archive.notes.append(f"prefix {prefix!r} stripped")
    return outside
