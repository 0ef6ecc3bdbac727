"""The engine behind every foreign format: a table of names and rules, read from left to right or from right to left.

A rule rearranges values and knows its inverse, so what a table reads it also writes, and the round trip is exact. Shapes are
checked on tensors without memory before a value is read.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.checkpoints.archive import Archive, Entry
from vitrail.checkpoints.report import Mapped, Report, size_text
from vitrail.errors import VitrailError, did_you_mean
from vitrail.models import Model


@dataclass(frozen=True)
class Rule:
    name: str
    read: Callable[[Tensor], Tensor]  # from the file's shape to ours
    write: Callable[[Tensor], Tensor]  # and back


SAME = Rule("same", lambda t: t, lambda t: t)
TRANSPOSED = Rule("transposed", lambda t: t.T, lambda t: t.T)
CONVOLUTION = Rule("HWIO → OIHW", lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))
DENSE_AS_HWIO = Rule("1×1 HWIO → matrix", lambda t: t[0, 0].T, lambda t: t.T[None, None])
DENSE_AS_OIHW = Rule("1×1 OIHW → matrix", lambda t: t[:, :, 0, 0], lambda t: t[:, :, None, None])


def head_rules(heads: int) -> tuple[Rule, Rule, Rule]:
    """Flax keeps attention by head: kernels into the heads (D, H, d), their biases (H, d), and the kernel out (H, d, D)."""
    into = Rule("(D, H, d) → matrix", lambda t: t.flatten(1).T, lambda t: t.T.unflatten(1, (heads, -1)))
    bias = Rule("(H, d) → vector", lambda t: t.flatten(), lambda t: t.unflatten(0, (heads, -1)))
    out = Rule("(H, d, D) → matrix", lambda t: t.flatten(0, 1).T, lambda t: t.T.unflatten(0, (heads, -1)))
    return into, bias, out


@dataclass(frozen=True)
class Row:
    """One tensor of ours and what it is in the file: one name, or several whose matrices lie in ours one below the other."""

    ours: str
    theirs: tuple[str, ...]
    rule: Rule = SAME


def row(ours: str, theirs: str | Sequence[str], rule: Rule = SAME) -> Row:
    return Row(ours, (theirs,) if isinstance(theirs, str) else tuple(theirs), rule)


def both(ours: str, theirs: str) -> tuple[Row, Row]:
    """Weight and bias, which have the same names and layout there as here."""
    return row(f"{ours}.weight", f"{theirs}.weight"), row(f"{ours}.bias", f"{theirs}.bias")


def repeated(rows: Iterable[Row], **numbers: int) -> list[Row]:
    """Rows with `{i}` and the like filled in."""
    return [Row(r.ours.format(**numbers), tuple(name.format(**numbers) for name in r.theirs), r.rule) for r in rows]


def present(rows: Iterable[Row], model: Model) -> list[Row]:
    """Only the rows this model has a tensor for: a table lists all that its format knows."""
    names = model.state_dict().keys()
    return [r for r in rows if r.ours in names]


def uncovered(rows: Iterable[Row], model: Model) -> list[str]:
    """Tensors of the model that the format has no name for."""
    known = {r.ours for r in rows}
    return [name for name in model.state_dict() if name not in known]


def rename(archive: Archive, changes: Sequence[tuple[str, str]], note: str = "") -> bool:
    """Apply the first fitting pattern to each name. Two tensors that would share a name are refused."""
    entries: dict[str, Entry] = {}
    changed = False
    for name, entry in archive.entries.items():
        new = name
        for pattern, replacement in changes:
            new, count = re.subn(pattern, replacement, name)
            if count:
                break
        changed |= new != name
        if new in entries:
            raise VitrailError(f"{archive.path} holds {new!r} in two spellings. Which one counts is unclear, so it is refused.")
        entries[new] = entry
    archive.entries = entries
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
    """Every tensor of the model from the file, or an error that lists what does not fit.

    `ignored` maps patterns of names a format is known to carry besides to the reason; `drop` are the user's own patterns.
    `finite` looks for NaN and infinity, which reads all values; a caller with a checksum can do without.
    """
    expected = model.state_dict()
    used = {name for r in rows for name in r.theirs}
    unknown = _leftovers(archive, used, report, ignored, drop)
    missing = [name for r in rows for name in r.theirs if name not in archive.entries]
    missing += [f"(anything for {name})" for name in uncovered(rows, model)]
    if unknown or missing:
        raise VitrailError(_both_sides(archive, unknown, missing))
    for r in rows:
        _check(archive, r, expected[r.ours])
    dtypes = {dtype for r in rows for name in r.theirs if (dtype := archive.entries[name].dtype)}
    dtype = _common(dtypes, archive)
    state = {}
    for r in rows:
        state[r.ours] = _read(archive, r, dtype, finite)
        shape = archive.entries[r.theirs[0]].shape
        rule = r.rule.name if len(r.theirs) == 1 else f"{len(r.theirs)} joined, each {r.rule.name}"
        report.mapped.append(Mapped(r.ours, r.theirs, tuple(expected[r.ours].shape), shape, rule))
    report.parameters = sum(tensor.numel() for tensor in expected.values())
    return state


def write_state(state: Mapping[str, Tensor], rows: Sequence[Row], report: Report) -> dict[str, Tensor]:
    """The same tensors under the file's names and in its layout."""
    tensors: dict[str, Tensor] = {}
    for r in rows:
        pieces = state[r.ours].detach().cpu().chunk(len(r.theirs))
        for name, piece in zip(r.theirs, pieces, strict=True):
            tensors[name] = r.rule.write(piece).contiguous()
        rule = r.rule.name if len(r.theirs) == 1 else f"split in {len(r.theirs)}, each {r.rule.name}"
        report.mapped.append(Mapped(r.ours, r.theirs, tuple(state[r.ours].shape), tuple(tensors[r.theirs[0]].shape), rule))
    report.parameters = sum(tensor.numel() for tensor in state.values())
    return tensors


def _leftovers(archive: Archive, used: set[str], report: Report, ignored: Mapping[str, str], drop: Sequence[str]) -> list[str]:
    unknown = []
    for name in archive.entries:
        if name in used:
            continue
        reason = next((why for pattern, why in ignored.items() if re.fullmatch(pattern, name)), None)
        if reason is None and any(fnmatch.fnmatchcase(name, pattern) for pattern in drop):
            reason = "dropped as asked"
        if reason is None:
            unknown.append(name)
        else:
            report.dropped.append((name, reason))
    return unknown


def _both_sides(archive: Archive, unknown: list[str], missing: list[str]) -> str:
    lines = [f"{archive.path} does not fit: every tensor must have its place, and every place its tensor."]
    for title, names in (("In the file without a place", unknown), ("Missing from the file", missing)):
        if names:
            more = f" … and {len(names) - 8} more" if len(names) > 8 else ""
            lines.append(f"{title} ({len(names)}): {', '.join(names[:8])}{more}.")
    if unknown and missing and (hint := did_you_mean(missing[0], unknown, count=1)):
        lines.append(f"For {missing[0]}:{hint}")
    if unknown:
        lines.append("Tensors that may be left out are named with drop=['pattern*'] (--drop on the command line).")
    return " ".join(lines)


def _check(archive: Archive, r: Row, ours: Tensor) -> None:
    if ours.shape[0] % len(r.theirs):
        raise VitrailError(f"{archive.path}: {r.ours} of {ours.shape[0]} rows cannot be made of {len(r.theirs)} equal parts.")
    wanted = tuple(r.rule.write(ours.chunk(len(r.theirs))[0]).shape)
    for name in r.theirs:
        entry = archive.entries[name]
        if entry.dtype is None:
            raise VitrailError(f"{archive.path}: {name!r} is no floating-point tensor, as weights must be. The file is damaged.")
        if entry.shape != wanted:
            raise VitrailError(
                f"{archive.path}: {name!r} is {size_text(entry.shape)} where the rest of the file asks for {size_text(wanted)}. "
                f"The tensors belong to different models, or the file is damaged."
            )


def _read(archive: Archive, r: Row, dtype: torch.dtype, finite: bool) -> Tensor:
    parts = [r.rule.read(archive.entries[name].read()) for name in r.theirs]
    tensor = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype).contiguous()
    if finite and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
        raise VitrailError(
            f"{archive.path}: {', '.join(r.theirs)} holds values that are not finite (NaN or infinite). "
            f"Such a model predicts nothing; the training that wrote it diverged, or the file is damaged."
        )
    return tensor


def _common(dtypes: set[torch.dtype], archive: Archive) -> torch.dtype:
    common = dtypes.pop() if dtypes else torch.float32
    for other in dtypes:
        wider = torch.promote_types(common, other)
        common = wider
    if dtypes:
        archive.notes.append(f"tensors of several precisions were brought to {str(common).removeprefix('torch.')}")
    return common
