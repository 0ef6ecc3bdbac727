"""What was measured: one row a subject and mode, kept in a CSV file as soon as it is known."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vitrail.bench.plan import OURS
from vitrail.errors import VitrailError
from vitrail.files import atomic_file

DONE, PARTIAL = "done", "partial"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One subject in one mode. A field that was not measured is None, and empty in the file."""

    model: str
    task: str
    """train or infer."""
    measure: str
    """throughput, latency or largest-batch."""
    who: str
    mode: str
    batch: int
    image_size: str
    precision: str
    clip: float | None = None
    status: str
    """done; partial: the run was stopped, or its time was up, before all rounds; out of memory; failed."""
    images_per_s: float | None = None
    """The median of the rounds."""
    slowest: float | None = None
    fastest: float | None = None
    """Images a second of the slowest and of the fastest round."""
    tflops: float | None = None
    """Teraflops a second of the model's own arithmetic."""
    ceiling_tflops: float | None = None
    """The fastest matrix product measured in the same run."""
    ceiling_share: float | None = None
    peak_gib: float | None = None
    """The most memory at any moment of a step."""
    first_step_s: float | None = None
    """Seconds of the very first step, compilation included."""
    clock_mhz: float | None = None
    watts: float | None = None
    """Medians of what the GPU's clock ran at, and drew, during the rounds."""
    p50_ms: float | None = None
    p95_ms: float | None = None
    largest_batch: int | None = None
    finite: bool | None = None
    rounds: int = 0
    steps: int = 0
    """Steps a round."""
    turns_with: int = 0
    """Other subjects it took turns with; 0: it ran alone."""
    parameters: int | None = None
    note: str = ""
    hardware: str = ""
    vitrail: str = ""
    torch: str = ""
    timm: str = ""
    transformers: str = ""
    torchvision: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What must agree for a row to stand for the same measurement."""
        return (*self.contest, self.who, self.mode)

    @property
    def contest(self) -> tuple[Any, ...]:
        """What must agree for two rows to be compared."""
        where = (self.hardware, self.torch)
        batch = self.batch if self.measure == "throughput" else 0
        return (self.model, self.task, self.measure, batch, self.image_size, self.precision, self.clip, *where)

    @property
    def score(self) -> float | None:
        """The figure that decides; more is better. None where nothing trustworthy was measured."""
        if self.status not in (DONE, PARTIAL) or self.finite is False:
            return None
        return self.largest_batch if self.measure == "largest-batch" else self.images_per_s


@dataclass(frozen=True)
class Ratio:
    """Our best mode against the fastest mode of the fastest peer."""

    ours: Row
    peer: Row

    @property
    def speed(self) -> float:
        """How many times our figure is the peer's: images a second, or the largest batch."""
        assert self.ours.score is not None and self.peer.score is not None
        return self.ours.score / self.peer.score

    @property
    def memory(self) -> float | None:
        """Our peak memory relative to the peer's."""
        return self.ours.peak_gib / self.peer.peak_gib if self.ours.peak_gib and self.peer.peak_gib else None

    @property
    def latency(self) -> float | None:
        """Our median time for one image relative to the peer's."""
        return self.ours.p50_ms / self.peer.p50_ms if self.ours.p50_ms and self.peer.p50_ms else None


def ratios(rows: Iterable[Row]) -> list[Ratio]:
    """One for each contest in which both sides have a figure, in the order of the rows; fp8 is out of it."""
    contests: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.score and not row.mode.endswith("fp8"):
            contests.setdefault(row.contest, []).append(row)
    found = []
    for entries in contests.values():
        ours = [row for row in entries if row.who == OURS]
        theirs = [row for row in entries if row.who != OURS]
        if ours and theirs:
            found.append(Ratio(_best(ours), _best(theirs)))
    return found


def _best(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row.score or 0.0)


class Ledger:
    """The rows, in a file that is whole after every change. Without a file they are only remembered."""

    def __init__(self, file: Path | None, *, fresh: bool = False) -> None:
        self.file = file
        self._rows: dict[tuple[Any, ...], Row] = {}
        if file is not None and file.exists() and not fresh:
            self._rows = {row.key: row for row in read_csv(file)}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def finished(self, row: Row) -> Row | None:
        """The row of an earlier run that makes this one needless."""
        found = self._rows.get(row.key)
        return found if found is not None and found.status == DONE else None

    def put(self, row: Row) -> None:
        """Keep a row, in place of an earlier state of it."""
        self._rows[row.key] = row
        if self.file is not None:
            write_csv(self.file, self.rows)


_NEEDED = {field.name for field in dataclasses.fields(Row)} - {"clock_mhz", "watts"}


def write_csv(file: Path, rows: Iterable[Row]) -> None:
    with atomic_file(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _written(value) for name, value in dataclasses.asdict(row).items()})


def read_csv(file: Path) -> list[Row]:
    hints = get_type_hints(Row)
    with file.open(newline="", encoding="utf-8") as handle:
        reader = csv.DictReader(handle)
        if not _NEEDED <= set(reader.fieldnames or ()) <= set(hints):  # columns that came later may be missing
            raise VitrailError(f"{file} does not have the columns of a benchmark. Choose another --out, or --fresh to replace it.")
        return [Row(**{name: _read(hints[name], text) for name, text in line.items()}) for line in reader]


def _written(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _read(hint: Any, text: str) -> Any:
    if hint is str:
        return text
    if not text:
        return None
    if hint == bool | None:
        return text == "True"
    return int(text) if hint in (int, int | None) else float(text)
