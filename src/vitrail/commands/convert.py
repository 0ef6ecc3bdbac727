"""`vitrail convert`: convert weights between formats."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich import box
from rich.table import Table

from vitrail.checkpoints import Report
from vitrail.checkpoints.report import MappedTensor, shape_text
from vitrail.commands.options import Json
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError, reason_of
from vitrail.regular_files import read_bytes
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle


def convert(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    *,
    to: Literal["vitrail", "google", "big-vision", "bit", "timm", "hf", "torchvision"] = "vitrail",
    heads: int | None = None,
    grid: tuple[int, int] | None = None,
    outputs: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    stem: Literal["sum", "repeat", "random"] | None = None,
    gelu: Literal["tanh", "erf"] | None = None,
    norm_eps: float | None = None,
    pooling: Literal["class", "mean", "map"] | None = None,
    preprocess: str | None = None,
    classes: Path | None = None,
    drop: tuple[str, ...] = (),
    all_rows: Annotated[bool, tyro.conf.arg(name="all")] = False,
    json_: Json = False,
) -> None:
    """Convert a checkpoint to another format and show how each tensor was mapped.

    The format of CHECKPOINT is detected from its content. The result is read back and compared bit for bit before OUT is
    created. The default format is Vitrail's own folder, which also stores preprocessing and class names.

    Example: vitrail convert ViT-B_16.npz vit-b16

    Example: vitrail convert hf:google/vit-base-patch16-224 vit.npz --to google

    Args:
        source: A folder, an .npz, .pth or .safetensors file, a name such as ViT-B/16@mae, or hf:owner/name.
        target: The folder or file to write: a folder for vitrail and hf, .npz for Google's formats, .safetensors or .pth for
            timm (or a folder, which timm can load) and torchvision.
        to: The format to write.
        heads: Number of attention heads. Needed if the file does not show it and the model has no published size.
        grid: Rows and columns of the position embedding. Needed if it is not square.
        outputs: Replace the head by a zero-initialised one with this many outputs; 0: no head.
        image_size: Resample the position embedding for images of this size.
        channels: Change the number of input channels; needs --stem.
        stem: How to adapt the first layer to other channels.
        gelu: The GELU that the weights were trained with, if the file does not show it.
        norm_eps: The epsilon of their layer norms, if the file does not show it.
        pooling: What their head reads, if the file does not show it: the class token, the mean of patches, or attention pooling.
        preprocess: The preprocessing the weights expect, if the file does not store it: google-vit, big-vision, timm, imagenet.
        classes: A text file with one class name per line, in the order of the outputs.
        drop: Patterns of tensor names to leave out, such as "decoder.*".
        all_rows: Show every tensor instead of one line per kind.
        json_: Print JSON instead of a table.
    """
    from vitrail.checkpoints import convert as convert_checkpoint

    check_place(Path(target))
    options: dict[str, Any] = {"heads": heads, "grid": grid, "outputs": outputs, "image_size": image_size}
    options |= {"channels": channels, "stem": stem, "preprocess": preprocess}
    options |= {"gelu": gelu, "norm_eps": norm_eps, "pooling": pooling}
    chosen = {key: value for key, value in options.items() if value is not None}
    names = _class_names(classes) if classes else None
    bundle, written = convert_checkpoint(source, target, to, classes=names, drop=drop, **chosen)
    if json_:
        say(to_json(_as_json(bundle, written), indent=2))
    else:
        _show(bundle, written, to, all_rows=all_rows)


def _show(bundle: Bundle, written: Report, to: str, *, all_rows: bool) -> None:
    # Tensor names are long: outside a terminal lines are wider, so that they are not wrapped.
    console = Console(width=None if sys.stdout.isatty() else 160)
    for report, title in ((bundle.report, f"read from {bundle.report.source}"), (written, f"written to {written.source}")):
        if report.format != "vitrail" or bundle.report.format == to == "vitrail":  # our own format has our own names
            console.print(_table(report, title, all_rows=all_rows))
    console.print(bundle.report.summary(), highlight=False)
    for note in [*bundle.report.assumptions, *bundle.report.notes, *written.notes]:
        console.print(f"· {note}", highlight=False)
    if bundle.preprocess:
        console.print(f"preprocessing {bundle.preprocess.describe()}", highlight=False)
    console.print(f"written to {written.source} as {to}, read back and verified", highlight=False)


def _class_names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in read_bytes(path).decode("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise VitrailError(
            f"Cannot read class names from {path}: {reason_of(error)}. Give a text file with one name per line."
        ) from error


def _table(report: Report, title: str, *, all_rows: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("in the file", "in the model", "shape in the file → model", "rule"):
        table.add_column(column, overflow="fold")
    for row, count in [(row, 1) for row in report.mapped] if all_rows else _collapsed(report.mapped):
        times = f" ×{count}" if count > 1 else ""
        model_shape = "" if row.rule == "same" else f" → {shape_text(row.ours_shape)}"
        table.add_row(_brace(row.theirs), row.ours + times, shape_text(row.theirs_shape) + model_shape, row.rule)
    for name, reason in report.dropped if all_rows else report.dropped[:12]:
        table.add_row(name, "dropped", "", reason)
    if len(report.dropped) > 12 and not all_rows:
        table.add_row(f"… and {len(report.dropped) - 12} more", "dropped", "", report.dropped[-1][1])
    return table


def _brace(names: tuple[str, ...]) -> str:
    """Join names that differ in one part: a/{query,key,value}/kernel."""
    if len(names) == 1:
        return names[0]
    parts = [re.split(r"([./])", name) for name in names]
    return "".join(part[0] if len(set(part)) == 1 else f"{{{','.join(part)}}}" for part in zip(*parts, strict=True))


def _collapsed(rows: list[MappedTensor]) -> list[tuple[MappedTensor, int]]:
    """Merge rows that differ only in a layer's index, which becomes `*`."""
    kinds: dict[tuple[Any, ...], tuple[MappedTensor, int]] = {}
    for row in rows:
        ours = re.sub(r"(?<=blocks\.)\d+|(?<=stages\.)\d+\.\d+", "*", row.ours)
        theirs = tuple(re.sub(r"(?<=[._/a-z])\d+(?=[./])", "*", name, count=2 if "stage" in ours else 1) for name in row.theirs)
        key = (ours, row.theirs_shape, row.ours_shape, row.rule)
        first, count = kinds.get(key, (MappedTensor(ours, theirs, row.ours_shape, row.theirs_shape, row.rule), 0))
        kinds[key] = (first, count + 1)
    return list(kinds.values())


def _as_json(bundle: Bundle, written: Report) -> dict[str, Any]:
    read = bundle.report
    return {
        "source": read.source,
        "from": read.format,
        "target": written.source,
        "to": written.format,
        "parameters": read.parameters,
        "percent": read.percent,
        "mapped": [dataclasses.asdict(row) for row in read.mapped],
        "written": [dataclasses.asdict(row) for row in written.mapped],
        "dropped": [{"name": name, "reason": reason} for name, reason in read.dropped],
        "notes": [*read.notes, *written.notes],
        "assumptions": read.assumptions,
    }
