"""`csv:FILE`: a table `path,label[,split]`. Several labels are written `a|b`; decimal numbers are regression targets."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.data.classes import split_name
from vitrail.data.decode import SUFFIXES
from vitrail.data.settings import rule_words
from vitrail.data.sources.files import FileSplit
from vitrail.data.sources.labels import drop_unused_classes, infer_task, parse_targets
from vitrail.data.sources.reference import OpenResult, Request
from vitrail.data.split import hold_out, older_name, rename
from vitrail.data.types import BadImage, Split
from vitrail.errors import VitrailError, counted
from vitrail.regular_files import read_bytes
from vitrail.text import has_surrogates

log = logging.getLogger("vitrail.data")
_COLUMNS = {
    "path": ("path", "image", "file", "filename", "file_name", "image_path", "filepath", "image_id"),
    "label": ("label", "labels", "class", "target", "targets", "category", "class_name"),
    "split": ("split", "set", "subset", "partition"),
}
_MAX_TABLE = 1 << 34


@dataclass
class Table:
    """The rows to use, column by column, with their line numbers."""

    lines: list[int]
    paths: list[str]
    labels: list[list[str]]
    splits: list[str]
    targets: tuple[str, ...]
    """Names of the label columns: one, or several numeric ones."""

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.lines = [self.lines[row] for row in rows]
        self.paths = [self.paths[row] for row in rows]
        self.labels = [self.labels[row] for row in rows]
        self.splits = [self.splits[row] for row in rows] if self.splits else []


def open_csv(request: Request) -> OpenResult:
    request.allow_options("root", "task", "targets", "val")
    file = Path(request.location).expanduser()
    root = Path(request.options.get("root", file.parent)).expanduser()
    table = _read(file, request)
    skipped = _missing_files(table, root, file, request)
    _refuse_duplicates(table, file)
    task_option = request.options.get("task", "regress" if "targets" in request.options else None)
    task = infer_task(table.labels, task_option)
    targets, classes = parse_targets(table.labels, task, table.targets, lambda row: f"{file}, line {table.lines[row]}")
    if task == "classify" and task_option is None:
        _warn_of_other_labels(file, classes)
    images = FileSplit("train", task, root, table.paths, targets, classes)
    if table.splits:
        if request.fraction("val", 0):
            raise VitrailError(
                f"val={request.options['val']} in {request.reference}: the table already has a split column. "
                "Remove the option, or the column."
            )
        names = [name for name in ("train", "val", "test") if name in set(table.splits)]
        column = np.array(table.splits)
        splits: dict[str, Split] = {}
        for name in names:
            splits[name] = drop_unused_classes(rename(images.subset(np.flatnonzero(column == name)), name))
        detail, rule = f"{task}, with a split column", None
    else:
        fraction = request.fraction("val", 0.1)
        older_file = file.with_name(f"{file.stem}-{older_name(request.rule, fraction)}")
        splits = hold_out(images, fraction, rule=request.rule, older_file=older_file)
        detail, rule = task, None
        if fraction:
            detail, rule = f"{task}, {fraction:.0%} held out {rule_words(request.rule)}", request.rule
    return OpenResult(splits=splits, detail=detail, skipped=skipped, rule=rule)


def _warn_of_other_labels(file: Path, classes: tuple[str, ...]) -> None:
    """Warn if classes look like lists of labels that another character separates, or like numbers with a decimal comma."""
    if classes and all(re.fullmatch(r"[+-]?\d+,\d+", name) for name in classes):
        log.warning("%s: labels such as %r are classes here; write numbers with a decimal point (1.5).", file, classes[0])
        return
    for mark in ";,":
        parts = {part.strip() for name in classes for part in name.split(mark)}
        if len(parts) < len(classes):
            example = next(name for name in classes if mark in name)
            several = "|".join(part.strip() for part in example.split(mark))
            log.warning("%s: %r is one class here; several labels of an image are written %r.", file, example, several)
            return


def _read(file: Path, request: Request) -> Table:
    rows = _rows(file)
    first = next(rows, None)
    if first is None:
        raise VitrailError(f"{file} is empty. The first line should be path,label or path,label,split.")
    if any(map(has_surrogates, first[1])):
        raise _not_utf8(file, first[0])
    columns, header = _columns(first[1], file, request)
    body = list(rows) if header else [first, *rows]
    if not body:
        raise VitrailError(f"{file} has a header but no rows. Add a row with path and label for each image.")
    path, labels, split = columns["path"][0], columns["label"], columns["split"]
    for line, cells in body:
        if any(map(has_surrogates, cells)) and not has_surrogates(cells[min(path, len(cells) - 1)]):
            raise _not_utf8(file, line)  # a class has another encoding only if it is a part of the path, as `data split` writes it
        if len(cells) != len(first[1]):
            raise VitrailError(
                f"{file}, line {line}: {counted(len(cells), 'cell')}, but the first line has {len(first[1])}. "
                'Quote names that contain a comma: "a, b.jpg",cat'
            )
    table = Table(
        lines=[line for line, _ in body],
        paths=[cells[path] for _, cells in body],
        labels=[[cells[k].strip() for k in labels] for _, cells in body],
        splits=[_split(cells[split[0]], line, file) for line, cells in body] if split else [],
        targets=tuple(first[1][k].strip() if header else "label" for k in labels),
    )
    blank = next((line for line, name in zip(table.lines, table.paths, strict=True) if not name.strip()), None)
    if blank:
        raise VitrailError(f"{file}, line {blank}: the path is empty. Add it, or remove the row.")
    return table


def _not_utf8(file: Path, line: int) -> VitrailError:
    return VitrailError(f"{file}, line {line} is not UTF-8 text. Save the table as 'CSV UTF-8'.")


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        # Spreadsheets write a byte order mark. Names of files need not be UTF-8; `_read` refuses other text.
        text = read_bytes(file, _MAX_TABLE).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise VitrailError(f"Cannot read the table {file}: {error.strerror}. Check the path.") from error
    if "\0" in text:
        raise VitrailError(f"{file} contains zero bytes, so it is not a text file. Save it as 'CSV UTF-8'.")
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        for cells in reader:
            if cells and any(map(str.strip, cells)):
                yield reader.line_num, cells
    except csv.Error as error:
        raise VitrailError(f"{file}, line {reader.line_num}: {error}. Check its quotes.") from error


def _columns(first: list[str], file: Path, request: Request) -> tuple[dict[str, list[int]], bool]:
    """Find the columns of path, label and split, and whether the first line is a header."""
    words = [cell.strip().casefold() for cell in first]
    found = {key: [k for k, word in enumerate(words) if word in names] for key, names in _COLUMNS.items()}
    if "targets" in request.options:
        targets = [word.strip().casefold() for word in request.options["targets"].split(",")]
        absent = [word for word in targets if word not in words]
        if absent:
            raise VitrailError(f"{file} has no column {absent[0]!r}; it has {', '.join(first)}.")
        found["label"] = [words.index(word) for word in targets]
    if not found["path"]:
        if words[0].endswith(SUFFIXES) and len(words) in (2, 3):
            return {"path": [0], "label": [1], "split": [2] if len(words) == 3 else []}, False
        raise VitrailError(
            f"{file} has no column with image paths; its first line is {', '.join(first)!r}. "
            "Name the columns path,label or path,label,split."
        )
    if not found["label"] and request.options.get("task") != "unlabelled":
        raise VitrailError(f"{file} has no column 'label' (it has {', '.join(first)}). Add one, or use ?task=unlabelled.")
    if "targets" not in request.options:
        found["label"] = found["label"][:1]
    return found, True


def _split(cell: str, line: int, file: Path) -> str:
    name = split_name(cell)
    if name is None:
        raise VitrailError(f"{file}, line {line}: the split is {cell!r}; expected train, val or test.")
    return name


def _missing_files(table: Table, root: Path, file: Path, request: Request) -> tuple[BadImage, ...]:
    """Refuse or skip rows whose file is missing. Each folder is listed once, which is faster than one stat per file."""
    listed: dict[str, set[str]] = {}
    missing = []
    for row, name in enumerate(table.paths):
        stripped = name.strip()
        for candidate in (name, stripped, stripped.replace("\\", "/")):  # the last was written on Windows
            if _exists(os.path.join(root, candidate), listed):  # noqa: PTH118 - a million Path objects take seconds
                table.paths[row] = candidate
                break
        else:
            table.paths[row] = stripped
            missing.append(row)
    if not missing:
        return ()
    if request.bad_images == "error":
        if has_surrogates(table.paths[missing[0]]):
            raise _not_utf8(file, table.lines[missing[0]])
        listing = "\n".join(f"  line {table.lines[row]}: {table.paths[row]}" for row in missing[:5])
        more = f"\n  … and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise VitrailError(
            f"{file} lists {counted(len(table.paths), 'image')}, of which {len(missing)} cannot be found:\n{listing}{more}\n"
            f"Paths are relative to {root}; use csv:{file}?root=DIR for another folder, or --bad-images skip to skip them."
        )
    skipped = tuple(
        BadImage(table.paths[row], f"no such file (line {table.lines[row]} of {file})", kind="missing") for row in missing
    )
    missing_rows = set(missing)
    table.select([row for row in range(len(table.paths)) if row not in missing_rows])
    if not table.paths:
        raise VitrailError(
            f"{file}: none of its images can be found. Paths are relative to {root}; use ?root=DIR for another folder."
        )
    return skipped


def _exists(path: str, listed: dict[str, set[str]]) -> bool:
    folder, name = os.path.split(os.path.normpath(path))
    if folder not in listed:
        try:
            listed[folder] = set(os.listdir(folder or "."))  # noqa: PTH208 - only names are needed
        except OSError:
            listed[folder] = set()
    return name in listed[folder]


def _refuse_duplicates(table: Table, file: Path) -> None:
    """Refuse a file that is listed twice in a split, and say which are in several."""
    seen: dict[tuple[str, str], int] = {}
    first_split: dict[str, str] = {}
    shared: dict[str, str] = {}
    for row, name in enumerate(table.paths):
        path, split = os.path.normpath(name), table.splits[row] if table.splits else ""
        if (split, path) in seen:
            raise VitrailError(
                f"{file}: lines {seen[split, path]} and {table.lines[row]} both list {name}. "
                "Use one row per image; write several labels as a|b."
            )
        seen[split, path] = table.lines[row]
        if first_split.setdefault(path, split) != split:
            shared.setdefault(path, f"{name} in {first_split[path]} and {split}")
    if shared:
        count, example = counted(len(shared), "file is", "files are"), next(iter(shared.values()))
        log.warning("%s: %s in more than one split, for example %s.", file, count, example)
