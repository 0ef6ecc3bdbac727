"""Print benchmark results: one table per comparison, and one line on our best mode against the fastest other library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from vitrail.bench.results import Ratio, Row, by_comparison, ratios
from vitrail.commands.terminal import Console
from vitrail.errors import counted

_NOISY = 1.3  # fastest over slowest round; above it a warning is printed


def console_for_tables() -> Console:
    """Return a console; in a file or a pipe, where there is no terminal width, it has 100 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=100)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print one table per comparison."""
    found = {ratio.ours.comparison: ratio for ratio in ratios(rows)}
    for comparison, entries in by_comparison(rows).items():
        console.print()
        console.print(_headline(entries), highlight=False, soft_wrap=True)
        console.print(_table(entries, found.get(comparison)))
        if comparison in found:
            console.print(summary(found[comparison]), highlight=False, soft_wrap=True)
        if clocks := _clocks(entries):
            console.print(clocks, style="dim", highlight=False, soft_wrap=True)
        spreads = [row.max_images_per_s / row.min_images_per_s for row in entries if row.max_images_per_s and row.min_images_per_s]
        spread = max(spreads, default=1.0)
        if spread > _NOISY and entries[0].metric == "throughput":
            warning = f"Rounds of the same entry differ by up to {spread:.1f}×: the machine was probably busy with other work."
            console.print(warning, style="yellow", highlight=False, soft_wrap=True)
        for row in entries:
            for note in _notes(row):
                console.print(f"{row.library} {row.mode}: {note}", style="yellow", highlight=False, soft_wrap=True)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows and ratios as plain values."""
    found = [
        {
            **{name: getattr(ratio.ours, name) for name in ("model", "task", "metric", "batch", "image_size", "precision")},
            "ours": ratio.ours.mode,
            "baseline": f"{ratio.baseline.library} {ratio.baseline.mode}",
            "ratio": ratio.speed,
            "memory_ratio": ratio.memory,
            "latency_ratio": ratio.latency,
        }
        for ratio in ratios(rows)
    ]
    return {"rows": [dataclasses.asdict(row) for row in rows], "ratios": found}


def summary(ratio: Ratio) -> str:
    """Summarise our best mode against the fastest mode of the fastest other library in one line."""
    ours, baseline = ratio.ours, ratio.baseline
    pair = f"vitrail {ours.mode} vs. {baseline.library} {baseline.mode}"
    if ours.metric == "latency":
        return f"{pair}: {ratio.latency:.2f}× the latency"
    if ours.metric == "largest-batch":
        return f"{pair}: {ratio.speed:.2f}× the batch"
    memory = f", {ratio.memory:.2f}× the memory" if ratio.memory else ""
    return f"{pair}: {ratio.speed:.2f}× the images/s{memory}"


def _clocks(rows: list[Row]) -> str:
    """List the GPU clock and power of each row: at the power limit a GPU lowers its clock."""
    known = [
        f"{row.library} {row.mode} {row.clock_mhz:,.0f} MHz, {row.watts:,.0f} W" for row in rows if row.clock_mhz and row.watts
    ]
    return "GPU clock and power: " + "; ".join(known) if known else ""


def _headline(rows: list[Row]) -> Text:
    one = rows[0]
    batch = f", batch {one.batch}" if one.metric == "throughput" else ""
    clip = f", gradients clipped to {one.clip:g}" if one.clip else ""
    peaks = [row.peak_tflops for row in rows if row.peak_tflops]
    peak = f", matmul peak {_number(max(peaks))} TFLOP/s" if peaks else ""
    what = {"throughput": "", "latency": " latency, batch 1", "largest-batch": ", largest batch"}[one.metric]
    settings = f"{batch}, {one.image_size} pixels, {one.precision}{clip}\n{one.hardware}{peak}"
    return Text.assemble((f"{one.model} {one.task}{what}", "bold"), settings)


def _table(rows: list[Row], ratio: Ratio | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "mode"):
        table.add_column(name, no_wrap=True)
    columns = {name: value for name, value in _COLUMNS[rows[0].metric].items() if any(map(value, rows))}
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    if ratio:
        table.add_column("ratio", justify="right", no_wrap=True)
    best = (ratio.ours, ratio.baseline) if ratio else ()
    for row in rows:
        cells = [value(row) for value in columns.values()]
        if row.status not in ("done", "partial"):
            cells = [row.status, *cells[1:]]
        if ratio:
            cells.append(_to_baseline(row, ratio))
        table.add_row(row.library, row.mode, *cells, style="bold" if row in best else None)
    return table


def _to_baseline(row: Row, ratio: Ratio) -> str:
    """Divide the row's latency, images/s or batch by that of the fastest other library."""
    one = Ratio(row, ratio.baseline)
    value = (one.latency if row.metric == "latency" else one.speed) if row.score else None
    return "" if value is None else f"{value:.2f}"


def _notes(row: Row) -> list[str]:
    found = [row.note] if row.note else []
    if row.finite is False:
        found.append("not counted: its outputs were not finite")
    if row.status == "partial":
        found.append(f"stopped after {counted(row.rounds, 'round')}")
    if row.rounds and not row.interleaved_with:
        found.append("ran alone, not in rounds alternating with others")
    return found


def _number(value: float | None) -> str:
    """Format a number with about three digits."""
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}" if value >= 1 else f"{value:.2g}"


def _range(row: Row) -> str:
    return "" if row.min_images_per_s is None else f"{_number(row.min_images_per_s)}–{_number(row.max_images_per_s)}"


_COST: dict[str, Callable[[Row], str]] = {
    "TFLOP/s": lambda row: _number(row.tflops),
    "% peak": lambda row: "" if row.peak_fraction is None else f"{row.peak_fraction:.0%}",
    "GiB": lambda row: "" if row.peak_memory_gib is None else f"{row.peak_memory_gib:.1f}",
    "1st step": lambda row: "" if row.first_step_s is None else f"{row.first_step_s:.1f} s",
}
_COLUMNS: dict[str, dict[str, Callable[[Row], str]]] = {
    "throughput": {"images/s": lambda row: _number(row.images_per_s), "min–max": _range, **_COST},
    "latency": {
        "p50": lambda row: "" if row.p50_ms is None else f"{row.p50_ms:.2f} ms",
        "p95": lambda row: "" if row.p95_ms is None else f"{row.p95_ms:.2f} ms",
        **_COST,
    },
    "largest-batch": {"largest batch": lambda row: "" if row.largest_batch is None else f"{row.largest_batch:,}"},
}
