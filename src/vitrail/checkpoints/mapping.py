"""Map tensor names and layouts between a file and a model, in both directions.

A format is a list of rows: our name, the file's names, and a rule that rearranges values and has an inverse. So what a format
reads it can also write, and the round trip is exact. Shapes are checked on meta tensors before any value is read.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.checkpoints.archive import Archive, StoredTensor
from vitrail.checkpoints.report import MappedTensor, Report, shape_text
from vitrail.errors import VitrailError, counted, did_you_mean
from vitrail.models import BiTConfig, Model, ModelConfig, ViTConfig, empty_model


@dataclass(frozen=True)
class Rule:
    name: str
    read: Callable[[Tensor], Tensor]  # the file's layout → ours
    write: Callable[[Tensor], Tensor]  # its inverse


SAME = Rule("same", lambda t: t, lambda t: t)
TRANSPOSED = Rule("transposed", lambda t: t.T, lambda t: t.T)
CONVOLUTION = Rule("HWIO → OIHW", lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))
DENSE_AS_HWIO = Rule("1×1 HWIO → matrix", lambda t: t[0, 0].T, lambda t: t.T[None, None])
DENSE_AS_OIHW = Rule("1×1 OIHW → matrix", lambda t: t[:, :, 0, 0], lambda t: t[:, :, None, None])


def head_rules(heads: int) -> tuple[Rule, Rule, Rule]:
    """Return rules for Flax's attention, stored per head: input kernels (D, H, d), biases (H, d), output kernel (H, d, D)."""
    into = Rule("(D, H, d) → matrix", lambda t: t.flatten(1).T, lambda t: t.T.unflatten(1, (heads, -1)))
    bias = Rule("(H, d) → vector", lambda t: t.flatten(), lambda t: t.unflatten(0, (heads, -1)))
    out = Rule("(H, d, D) → matrix", lambda t: t.flatten(0, 1).T, lambda t: t.T.unflatten(0, (heads, -1)))
    return into, bias, out


@dataclass(frozen=True)
class Row:
    """One tensor of ours and its name in the file, or several names whose tensors are concatenated along dimension 0."""

    ours: str
    theirs: tuple[str, ...]
    rule: Rule = SAME


def row(ours: str, theirs: str | Sequence[str], rule: Rule = SAME) -> Row:
    return Row(ours, (theirs,) if isinstance(theirs, str) else tuple(theirs), rule)


def weight_and_bias(ours: str, theirs: str) -> tuple[Row, Row]:
    """Return rows for a weight and a bias with the same layout as ours."""
    return row(f"{ours}.weight", f"{theirs}.weight"), row(f"{ours}.bias", f"{theirs}.bias")


def numbered(rows: Iterable[Row], **numbers: int) -> list[Row]:
    """Fill in numbers such as `{i}` in the names."""
    return [Row(r.ours.format(**numbers), tuple(name.format(**numbers) for name in r.theirs), r.rule) for r in rows]


def empty_model_for(config: ModelConfig, archive: Archive) -> Model:
    """Build an empty model, but not one with more blocks than the file has tensors: that takes hours and can match no file."""
    layers = config.resnet.layers if isinstance(config, (ViTConfig, BiTConfig)) and config.resnet else ()
    blocks = sum(layers) + (config.blocks if isinstance(config, ViTConfig) else 0)
    if blocks > len(archive.tensors):
        raise VitrailError(
            f"{archive.path} has {counted(len(archive.tensors), 'tensor')}, but the config means {blocks:,} blocks. "
            f"One of them belongs to another model, or is corrupted."
        )
    return empty_model(config)


def add_class_position(archive: Archive, token: str, table: str) -> None:
    """Add the class token's position to it: DINOv2's table covers the class token, but not the registers behind it."""
    first, rest = archive.tensors.get(token), archive.tensors.get(table)
    if first is None or rest is None or len(rest.shape) != 3 or rest.shape[1] < 2:
        return
    archive.tensors[token] = StoredTensor(first.shape, first.dtype, lambda: first.read() + rest.read()[:, :1])
    shape = (rest.shape[0], rest.shape[1] - 1, rest.shape[2])
    archive.tensors[table] = StoredTensor(shape, rest.dtype, lambda: rest.read()[:, 1:])
    archive.notes.append("DINOv2's registers: the class token's position was added to the token")


def rows_of(rows: Iterable[Row], model: Model) -> list[Row]:
    """Keep only the rows whose tensors this model has."""
    names = model.state_dict().keys()
    return [r for r in rows if r.ours in names]


def unmapped(rows: Iterable[Row], model: Model) -> list[str]:
    """Return the tensors of the model that no row maps."""
    known = {r.ours for r in rows}
    return [name for name in model.state_dict() if name not in known]


def rename(archive: Archive, changes: Sequence[tuple[str, str]], note: str = "") -> bool:
    """Apply the first matching pattern to each name; raise an error if two tensors get the same name."""
    tensors: dict[str, StoredTensor] = {}
    changed = False
    for name, tensor in archive.tensors.items():
        new = name
        for pattern, replacement in changes:
            new, count = re.subn(pattern, replacement, name)
            if count:
                break
        changed |= new != name
        if new in tensors:
            raise VitrailError(
                f"{archive.path} contains {new!r} under two names, so it is unclear which one to use. Save only one of them."
            )
        tensors[new] = tensor
    archive.tensors = tensors
    if changed and note:
        archive.notes.append(note)
    return changed


def read_state(
    archive: Archive,
    rows: Sequence[Row],
    model: Model,
    report: Report,
    *,
    ignored: Mapping[str, str],
    drop: Sequence[str],
    finite: bool = True,
) -> dict[str, Tensor]:
    """Read every tensor of the model from the file, or raise an error that lists missing and unexpected tensors.

    `ignored` maps regexes of further names in this format to the reason to drop them; `drop` are the user's patterns.
    `finite` checks for NaN and infinity, which reads all values; a caller that checks a checksum can skip it.
    """
    expected = model.state_dict()
    used = {name for r in rows for name in r.theirs}
    unknown = _unused(archive, used, report, ignored, drop)
    missing = [name for r in rows for name in r.theirs if name not in archive.tensors]
    missing += [f"(a tensor for {name})" for name in unmapped(rows, model)]
    if unknown or missing:
        raise VitrailError(_mismatch(archive, unknown, missing))
    for r in rows:
        _check(archive, r, expected[r.ours])
    dtypes = {dtype for r in rows for name in r.theirs if (dtype := archive.tensors[name].dtype)}
    dtype = _common_dtype(dtypes, archive)
    state = {}
    for r in rows:
        state[r.ours] = _read(archive, r, dtype, finite)
        shape = archive.tensors[r.theirs[0]].shape
        rule = r.rule.name if len(r.theirs) == 1 else f"{len(r.theirs)} concatenated, each {r.rule.name}"
        report.mapped.append(MappedTensor(r.ours, r.theirs, tuple(expected[r.ours].shape), shape, rule))
    report.parameters = sum(tensor.numel() for tensor in expected.values())
    return state


def write_state(state: Mapping[str, Tensor], rows: Sequence[Row], report: Report) -> dict[str, Tensor]:
    """Return the tensors under the file's names and in its layout."""
    tensors: dict[str, Tensor] = {}
    for r in rows:
        pieces = state[r.ours].detach().cpu().chunk(len(r.theirs))
        for name, piece in zip(r.theirs, pieces, strict=True):
            tensors[name] = r.rule.write(piece).contiguous()
        rule = r.rule.name if len(r.theirs) == 1 else f"split into {len(r.theirs)}, each {r.rule.name}"
        report.mapped.append(MappedTensor(r.ours, r.theirs, tuple(state[r.ours].shape), tuple(tensors[r.theirs[0]].shape), rule))
    report.parameters = sum(tensor.numel() for tensor in state.values())
    return tensors


def _unused(archive: Archive, used: set[str], report: Report, ignored: Mapping[str, str], drop: Sequence[str]) -> list[str]:
    unknown = []
    for name in archive.tensors:
        if name in used:
            continue
        reason = next((why for pattern, why in ignored.items() if re.fullmatch(pattern, name)), None)
        if reason is None and any(fnmatch.fnmatchcase(name, pattern) for pattern in drop):
            reason = "dropped by the user"
        if reason is None:
            unknown.append(name)
        else:
            report.dropped.append((name, reason))
    return unknown


def _mismatch(archive: Archive, unknown: list[str], missing: list[str]) -> str:
    lines = [f"{archive.path} does not match the model."]
    for title, names in (("Unexpected in the file", unknown), ("Missing from the file", missing)):
        if names:
            more = f" … and {len(names) - 8} more" if len(names) > 8 else ""
            lines.append(f"{title} ({len(names)}): {', '.join(names[:8])}{more}.")
    if unknown and missing and (hint := did_you_mean(missing[0], unknown, count=1)):
        lines.append(f"For {missing[0]}:{hint}")
    if unknown:
        lines.append("To leave tensors out, use drop=['pattern*'] (--drop on the command line).")
    return " ".join(lines)


def _check(archive: Archive, r: Row, ours: Tensor) -> None:
    expected = tuple(r.rule.write(ours.chunk(len(r.theirs))[0]).shape)
    for name in r.theirs:
        tensor = archive.tensors[name]
        if tensor.dtype is None:
            raise VitrailError(
                f"{archive.path}: {name!r} is not a floating-point tensor. The file is corrupted or quantised: give float weights."
            )
        if tensor.shape != expected:
            raise VitrailError(
                f"{archive.path}: {name!r} is {shape_text(tensor.shape)}, but the other tensors need {shape_text(expected)}. "
                f"The tensors belong to different models, or the file is corrupted."
            )


def _read(archive: Archive, r: Row, dtype: torch.dtype, finite: bool) -> Tensor:
    parts = [r.rule.read(archive.tensors[name].read()) for name in r.theirs]
    tensor = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype).contiguous()
    if finite and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
        raise VitrailError(
            f"{archive.path}: {', '.join(r.theirs)} {'contains' if len(r.theirs) == 1 else 'contain'} values that are not finite "
            "(NaN or infinite). The training diverged, or the file is corrupted."
        )
    return tensor


def _common_dtype(dtypes: set[torch.dtype], archive: Archive) -> torch.dtype:
    common = dtypes.pop() if dtypes else torch.float32
    for other in dtypes:
        common = torch.promote_types(common, other)
    if dtypes:
        archive.notes.append(f"tensors of several dtypes were converted to {str(common).removeprefix('torch.')}")
    return common
