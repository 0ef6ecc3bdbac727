"""Results: one row per library and mode, written to a CSV file as soon as it is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.bench.plan import OURS
from vitrail.errors import VitrailError
from vitrail.files import read_csv as read_dataclasses
from vitrail.files import write_csv

DONE, PARTIAL = "done", "partial"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one library in one mode. A value that was not measured is None, and empty in the file."""

    model: str
    task: str
    """train or infer."""
    metric: str
    """throughput, latency or largest-batch."""
    library: str
    mode: str
    batch: int
    image_size: str
    precision: str
    clip: float | None = None
    status: str
    """done; partial (stopped or out of time before all rounds); out of memory; failed."""
    images_per_s: float | None = None
    """The median of the rounds."""
    min_images_per_s: float | None = None
    max_images_per_s: float | None = None
    """Of the slowest and the fastest round."""
    tflops: float | None = None
    """TFLOP/s of the model's own arithmetic."""
    peak_tflops: float | None = None
    """TFLOP/s of the fastest matmul measured in the same run."""
    peak_fraction: float | None = None
    """`tflops / peak_tflops`."""
    peak_memory_gib: float | None = None
    first_step_s: float | None = None
    """Seconds of the first step, including compilation."""
    clock_mhz: float | None = None
    watts: float | None = None
    """Median SM clock and power draw of the GPU during the rounds."""
    p50_ms: float | None = None
    p95_ms: float | None = None
    largest_batch: int | None = None
    finite: bool | None = None
    rounds: int = 0
    steps: int = 0
    """Steps per round."""
    interleaved_with: int = 0
    """How many other entries ran in rounds alternating with this one; 0: it ran alone."""
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
        """Identify the measurement: two rows with equal keys replace each other."""
        return (*self.comparison, self.library, self.mode)

    @property
    def comparison(self) -> tuple[Any, ...]:
        """Return the values that must agree for two rows to be compared."""
        environment = (self.hardware, self.torch)
        batch = self.batch if self.metric == "throughput" else 0
        return (self.model, self.task, self.metric, batch, self.image_size, self.precision, self.clip, *environment)

    @property
    def score(self) -> float | None:
        """Return the value that rows are compared by, higher is better; None for failed or non-finite runs."""
        if self.status not in (DONE, PARTIAL) or self.finite is False:
            return None
        return self.largest_batch if self.metric == "largest-batch" else self.images_per_s


@dataclass(frozen=True)
class Ratio:
    """Our best mode against the fastest mode of the fastest other library."""

    ours: Row
    baseline: Row

    @property
    def speed(self) -> float:
        """Return our images/s, or largest batch, divided by the baseline's."""
        assert self.ours.score is not None and self.baseline.score is not None
        return self.ours.score / self.baseline.score

    @property
    def memory(self) -> float | None:
        """Return our peak memory divided by the baseline's."""
        ours, theirs = self.ours.peak_memory_gib, self.baseline.peak_memory_gib
        return ours / theirs if ours and theirs else None

    @property
    def latency(self) -> float | None:
        """Return our median latency divided by the baseline's."""
        return self.ours.p50_ms / self.baseline.p50_ms if self.ours.p50_ms and self.baseline.p50_ms else None


def ratios(rows: Iterable[Row]) -> list[Ratio]:
    """Return one ratio per comparison in which both sides have a score, in the order of the rows.

    fp8 modes are excluded: the other libraries run in bf16.
    """
    found = []
    for entries in by_comparison(row for row in rows if row.score and not row.mode.endswith("fp8")).values():
        ours = [row for row in entries if row.library == OURS]
        theirs = [row for row in entries if row.library != OURS]
        if ours and theirs:
            found.append(Ratio(_best(ours), _best(theirs)))
    return found


def by_comparison(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows that can be compared."""
    comparisons: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        comparisons.setdefault(row.comparison, []).append(row)
    return comparisons


def _best(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row.score or 0.0)


class ResultsFile:
    """Rows in a CSV file that is rewritten atomically after every change. Without a file they are kept in memory."""

    def __init__(self, file: Path | None, *, overwrite: bool = False) -> None:
        self.file = file
        self._rows: dict[tuple[Any, ...], Row] = {}
        if file is not None and file.exists() and not overwrite:
            self._rows = {row.key: row for row in read_csv(file)}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def finished(self, row: Row) -> Row | None:
        """Return the finished row of an earlier run with the same key, if there is one."""
        found = self._rows.get(row.key)
        return found if found is not None and found.status == DONE else None

    def put(self, row: Row) -> None:
        """Add a row, or replace the one with the same key."""
        self._rows[row.key] = row
        if self.file is not None:
            write_csv(self.file, Row, self.rows)


def read_csv(file: Path) -> list[Row]:
    try:
        rows = read_dataclasses(file, Row, optional=("clock_mhz", "watts"))  # added later
    except (ValueError, KeyError):  # a cell that is not a number, a row with too many cells
        rows = None
    if rows is None:
        raise VitrailError(
            f"{file} does not have the columns or the values of a benchmark. Choose another --out, or replace it with --overwrite."
        )
    return rows
