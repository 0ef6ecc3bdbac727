"""`vitrail data check | split | pack`: check a dataset, split it, and pack it for fast training."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from vitrail.commands.options import Json, progress_bar
from vitrail.commands.output import check_output_file, check_place
from vitrail.commands.terminal import Console, say
from vitrail.cpus import usable_cpus
from vitrail.data.settings import Duplicates, Fit, Store
from vitrail.errors import VitrailError, counted
from vitrail.text import printable, to_json

if TYPE_CHECKING:
    from vitrail.data.check import Problem, Report, SplitReport
    from vitrail.data.types import Source


Reference = Annotated[str, tyro.conf.arg(metavar="SOURCE")]
_MAX_ITEMS = 5
_WORKERS = min(8, usable_cpus())


def check(
    source: Reference,
    /,
    *,
    sheet: Path | None = None,
    overwrite: bool = False,
    duplicates: Duplicates = "near",
    workers: int = _WORKERS,
    json_: Json = False,
) -> int:
    """Read every image of a dataset once, and report its content and its problems. Exit status 1 if there are problems.

    Example: vitrail data check photos/

    Example: vitrail data check csv:labels.csv --sheet photos.png --json

    Args:
        source: A folder, a table, or any other source such as torchvision:CIFAR10.
        sheet: Write a contact sheet, a PNG with a few images of each class, to this file.
        overwrite: Replace an existing file.
        duplicates: Duplicates to find: near (includes exact), exact, or none.
        workers: Number of threads that read images.
        json_: Print JSON instead of tables.
    """
    from vitrail.data.check import Report
    from vitrail.data.check import check as check_source
    from vitrail.data.contact_sheet import contact_sheet

    check_output_file(sheet, overwrite=overwrite)
    console = Console(stderr=json_)
    with _warnings_as_notes() as notes:
        opened, problems = _open_leniently(source)
    if opened is None:
        report = Report(source=source, splits={}, problems=problems, notes=notes)
    else:
        console.print(opened.describe(), highlight=False, soft_wrap=True)
        with progress_bar(console, "checking", sum(map(len, opened.splits.values()))) as advance:
            report = check_source(opened, duplicates=duplicates, workers=workers, progress=advance)
        report.problems[:0] = problems
        report.notes[:0] = notes
        if sheet is not None:
            contact_sheet(opened, sheet)
    if json_:
        written = str(sheet) if sheet is not None and opened is not None else None
        say(to_json({**report.to_dict(), "contact_sheet": written}, indent=2))
    else:
        _show(report, sheet if opened is not None else None, console)
    return 1 if report.problems else 0


def split(
    source: Reference,
    table: Annotated[Path, tyro.conf.arg(metavar="OUT")],
    /,
    *,
    val: float = 0.1,
    test: float = 0.0,
    seed: int = 0,
    json_: Json = False,
) -> None:
    """Split a dataset, stratified by class, and write the split as a table, to be used as csv:OUT.

    Existing `val` and `test` splits are kept; only the training images are divided.

    Example: vitrail data split photos/ photos-split.csv --val 0.1 --test 0.1

    Args:
        source: A folder or table of image files.
        table: The CSV file to write: path,label,split.
        val: Fraction of each class to hold out for validation.
        test: Fraction of each class to hold out for the final test.
        seed: Selects the images; the same seed gives the same split.
        json_: Print JSON instead of text.
    """
    import numpy as np

    from vitrail.data.sources import open_source, resolve
    from vitrail.data.sources.reference import format_reference
    from vitrail.data.split import rename, stratified, write_table

    check_place(table)
    if table.exists():
        raise VitrailError(f"{table} already exists. Delete it, or choose another name.")
    if not (0 <= val < 1 and 0 <= test < 1 and val + test < 1 and val + test > 0):
        raise VitrailError(f"val {val:g} and test {test:g}: expected fractions from 0 to below 1, with a sum above 0 and below 1.")
    kind, location, options = resolve(source)
    opened = open_source(format_reference(kind, location, {**options, "val": "0"}))
    parts = dict(opened.splits)
    for name, fraction in (("test", test), ("val", val)):
        if fraction and name in parts:
            raise VitrailError(f"{source} already has a split {name!r}. Pass --{name} 0 to keep it.")
    train = opened.split("train")
    rest = np.arange(len(train))
    for name, fraction, remaining in (("test", test, 1.0), ("val", val, 1 - test)):
        if fraction:
            part = train.subset(rest)
            held_out = stratified(part, fraction / remaining, seed=seed)
            parts[name] = rename(part.subset(held_out), name)
            rest = np.delete(rest, held_out)
    parts["train"] = rename(train.subset(rest), "train")
    parts = {name: parts[name] for name in ("train", "val", "test") if name in parts}
    write_table(parts.values(), table)
    counts = {name: len(part) for name, part in parts.items()}
    if json_:
        say(to_json({"table": str(table), "splits": counts, "seed": seed}))
    else:
        sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        Console().print(f"{table}: {sizes} images. Use it as csv:{table}", highlight=False, soft_wrap=True)


def pack(
    source: Reference,
    destination: Annotated[Path, tyro.conf.arg(metavar="OUT")],
    /,
    *,
    image_size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    store: Store | None = None,
    channels: int | None = None,
    bits: Literal[8, 16] = 8,
    quality: int = 95,
    bad_images: Literal["error", "skip"] = "error",
    workers: int = _WORKERS,
    json_: Json = False,
) -> None:
    """Decode and resize a dataset once, into files that training reads without decoding. Run again to resume.

    Example: vitrail data pack photos/ photos-256 --image-size 256

    Example: vitrail data pack photos/ photos-small --image-size 256 --store encoded

    Args:
        source: A folder, a table, or any other source.
        destination: The folder to write; use it as packed:OUT.
        image_size: Side of the packed images, or height and width. Not needed if all images have the same size.
        fit: Keep the aspect ratio and crop the centre, or stretch.
        store: Arrays of pixels of one size, memory-mapped; or encoded files (with --image-size, their short side is resized to it).
        channels: 1 grey, 3 colour, 4 with alpha; default: as in the images.
        bits: Bits per pixel value.
        quality: JPEG quality, if encoded files are resized.
        bad_images: Stop at an unreadable image, or skip it and list it in packed.json.
        workers: Number of threads that convert images.
        json_: Print JSON instead of text.
    """
    from vitrail.data.pack import choose_settings
    from vitrail.data.pack import pack as pack_source
    from vitrail.data.sources import open_source

    check_place(destination)
    console = Console(stderr=json_)
    opened = open_source(source, bad_images=bad_images)
    console.print(opened.describe(), highlight=False, soft_wrap=True)
    settings = choose_settings(opened, size=image_size, fit=fit, store=store, channels=channels, bits=bits, quality=quality)
    start = time.perf_counter()
    try:
        with progress_bar(console, "packing", sum(map(len, opened.splits.values()))) as advance:
            description = pack_source(opened, destination, settings, bad_images=bad_images, workers=workers, progress=advance)
    except KeyboardInterrupt:
        console.print("Stopped. Run the same command again to resume.")
        raise
    result = {
        "packed": str(destination),
        "splits": {name: part["count"] for name, part in description["splits"].items()},
        "bytes": sum(part["bytes"] for part in description["splits"].values()),
        "skipped": description["skipped"],
        **description["packing"],
    }
    if json_:
        say(to_json(result, indent=2))
    else:
        console.print(_packed_summary(result, time.perf_counter() - start), highlight=False, soft_wrap=True)


def _packed_summary(result: dict[str, Any], seconds: float) -> str:
    sizes = ", ".join(f"{name} {count:,}" for name, count in result["splits"].items())
    bad = counted(len(result["skipped"]), "bad image")
    skipped = f" Skipped {bad}, listed in packed.json." if result["skipped"] else ""
    about = f"{sizes} images, {result['bytes'] / 2**20:,.0f} MiB, checksums verified, {seconds:.0f} s"
    return f"{result['packed']}: {about}.{skipped} Use it as packed:{result['packed']}"


def _open_leniently(reference: str) -> tuple[Source | None, list[Problem]]:
    """Open a source without bad images and unknown classes if possible, so that one problem does not hide the next."""
    from vitrail.data.check import Problem
    from vitrail.data.sources import open_source

    try:
        return open_source(reference, bad_images="skip"), []
    except VitrailError as error:
        problems = [Problem(kind="source", message=str(error))]
    try:
        return open_source(reference, bad_images="skip", ignore_unknown=True), problems
    except VitrailError:
        return None, problems


@contextmanager
def _warnings_as_notes() -> Iterator[list[str]]:
    """Collect warnings logged while a source is opened, for the report."""
    notes: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "kind", None) != "missing-class":  # the report has its own note on missing classes
                notes.append(record.getMessage())

    logger, handler = logging.getLogger("vitrail.data"), Collect(logging.WARNING)
    logger.addHandler(handler)
    propagated, logger.propagate = logger.propagate, False
    try:
        yield notes
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


def _show(report: Report, sheet: Path | None, console: Console) -> None:
    if report.splits:
        console.print(_overview(report))
        classes = _classes(report)
        if classes is not None:
            console.print(classes)
    for note in report.notes:
        console.print(Text.assemble(("note", "yellow"), f"    {note}"), highlight=False, soft_wrap=True)
    for problem in report.problems:
        console.print(Text.assemble(("problem", "red"), f" {problem.message}"), highlight=False, soft_wrap=True)
        for item in problem.items[:_MAX_ITEMS]:
            console.print(f"          {printable(item, one_line=True)}", highlight=False, soft_wrap=True)
        if len(problem.items) > _MAX_ITEMS:
            console.print(
                f"          … and {len(problem.items) - _MAX_ITEMS:,} more; --json lists all.", highlight=False, soft_wrap=True
            )
    if sheet is not None:
        console.print(f"Contact sheet: {sheet}", highlight=False, soft_wrap=True)
    if not report.problems:
        console.print("No problems found.", style="green", highlight=False)


def _overview(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("split", "images", "sizes (height×width)", "modes", "formats"):
        table.add_column(heading, justify="right" if heading == "images" else "left")
    for name, part in report.splits.items():
        table.add_row(name, f"{part.images:,}", _sizes(part), _counts(part.modes), _counts(part.formats))
    return table


def _sizes(part: SplitReport) -> str:
    import numpy as np

    if len(part.sizes) <= 4:
        return _counts(Counter({f"{height}×{width}": count for (height, width), count in part.sizes.items()}))
    shorts = np.sort(np.repeat([min(size) for size in part.sizes], list(part.sizes.values())))
    edges = [16, 32, 64, 128, 256, 512, 1024, 2048]
    bins = Counter(int(np.searchsorted(edges, value, side="right")) for value in shorts)
    names = [
        f"under {edges[0]}",
        *(f"{low}–{high - 1}" for low, high in pairwise(edges)),
        f"{edges[-1]} or more",
    ]
    rows = "\n".join(f"{names[k]}: {bins[k]:,}" for k in sorted(bins))
    return f"short side {shorts[0]} to {shorts[-1]}, median {shorts[len(shorts) // 2]}\n{rows}"


def _counts(counter: Counter[str]) -> str:
    total = sum(counter.values())
    rows = counter.most_common(6)
    return "\n".join(name if count == total else f"{name}: {count:,}" for name, count in rows)


def _classes(report: Report) -> Table | None:
    names = list(next(iter(report.splits.values())).per_class)
    if not names:
        return None
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("class")
    for split_name in report.splits:
        table.add_column(split_name, justify="right")
    shown = names if len(names) <= 30 else [*names[:12], "…", *names[-6:]]
    for name in shown:
        cells = (part.per_class.get(name) for part in report.splits.values())
        table.add_row(
            printable(name, one_line=True),
            *("" if count is None else f"{count:,}" if count else Text("0", "red") for count in cells),
        )
    if len(names) > 30:
        spans = ((part.per_class.values()) for part in report.splits.values())
        table.add_section()
        table.add_row(f"{len(names)} classes, smallest to largest", *(f"{min(span):,} to {max(span):,}" for span in spans))
    return table
