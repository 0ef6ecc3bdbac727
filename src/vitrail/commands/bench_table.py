"""How a benchmark is shown: one table a contest, and our best against the fastest peer in a sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vitrail.bench.rows import Ratio, Row, ratios

_UNEVEN = 1.3  # fastest over slowest round, beyond which figures are not to be relied on


def console_for_tables() -> Console:
    """In a file or a pipe there is no width to keep to, but lines of a hundred columns are good to read."""
    console = Console()
    return console if console.is_terminal else Console(width=100)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows, those that can be compared together."""
    contests: dict[Any, list[Row]] = {}
    for row in rows:
        contests.setdefault(row.contest, []).append(row)
    against = {ratio.ours.contest: ratio for ratio in ratios(rows)}
    for contest, entries in contests.items():
        console.print()
        console.print(_headline(entries), highlight=False, soft_wrap=True)
        console.print(_table(entries, against.get(contest)))
        if contest in against:
            console.print(verdict(against[contest]), highlight=False, soft_wrap=True)
        if clocks := _clocks(entries):
            console.print(clocks, style="dim", highlight=False, soft_wrap=True)
        uneven = max((row.fastest / row.slowest for row in entries if row.fastest and row.slowest), default=1.0)
        if uneven > _UNEVEN and entries[0].measure == "throughput":
            words = f"Rounds of the same subject differ by up to {uneven:.1f}×: the machine was busy with something else as well."
            console.print(words, style="yellow", highlight=False, soft_wrap=True)
        for row in entries:
            for remark in _remarks(row):
                console.print(f"{row.who} {row.mode}: {remark}", style="yellow", highlight=False, soft_wrap=True, markup=False)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The same for a program."""
    found = [
        {
            **{name: getattr(ratio.ours, name) for name in ("model", "task", "measure", "batch", "image_size", "precision")},
            "ours": ratio.ours.mode,
            "peer": f"{ratio.peer.who} {ratio.peer.mode}",
            "ratio": ratio.speed,
            "memory_ratio": ratio.memory,
            "latency_ratio": ratio.latency,
        }
        for ratio in ratios(rows)
    ]
    return {"rows": [dataclasses.asdict(row) for row in rows], "ratios": found}


def verdict(ratio: Ratio) -> str:
    """Our best against the fastest mode of the fastest peer, in a sentence."""
    ours, peer = ratio.ours, ratio.peer
    who = f"vitrail {ours.mode} against {peer.who} {peer.mode}"
    if ours.measure == "latency":
        return f"{who}: {ratio.latency:.2f}× the time for one image"
    if ours.measure == "largest-batch":
        return f"{who}: {ratio.speed:.2f}× the batch"
    memory = f", {ratio.memory:.2f}× the memory" if ratio.memory else ""
    return f"{who}: {ratio.speed:.2f}× the images a second{memory}"


def _clocks(rows: list[Row]) -> str:
    """At what clock and power each was measured: where the power is at its limit, the clock has given way."""
    known = [f"{row.who} {row.mode} {row.clock_mhz:,.0f} MHz, {row.watts:,.0f} W" for row in rows if row.clock_mhz and row.watts]
    return "The GPU meanwhile: " + "; ".join(known) if known else ""


def _headline(rows: list[Row]) -> str:
    one = rows[0]
    batch = f", batch {one.batch}" if one.measure == "throughput" else ""
    clip = f", clipped to {one.clip:g}" if one.clip else ""
    tops = [row.ceiling_tflops for row in rows if row.ceiling_tflops]
    top = f"; matrix products reach {_number(max(tops))} TFLOP/s" if tops else ""
    what = {"throughput": "", "latency": " one image at a time", "largest-batch": ", largest batch"}[one.measure]
    return f"[bold]{one.model} {one.task}{what}[/bold]{batch}, {one.image_size} pixels, {one.precision}{clip}\n{one.hardware}{top}"


def _table(rows: list[Row], ratio: Ratio | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "mode"):
        table.add_column(name, no_wrap=True)
    columns = {name: value for name, value in _COLUMNS[rows[0].measure].items() if any(map(value, rows))}
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    if ratio:
        table.add_column("× peer", justify="right", no_wrap=True)
    best = (ratio.ours, ratio.peer) if ratio else ()
    for row in rows:
        cells = [value(row) for value in columns.values()]
        if row.status not in ("done", "partial"):
            cells = [row.status, *cells[1:]]
        if ratio:
            cells.append(_to_peer(row, ratio))
        table.add_row(row.who, row.mode, *cells, style="bold" if row in best else None)
    return table


def _to_peer(row: Row, ratio: Ratio) -> str:
    """The row's own figure over that of the fastest peer: times for latency, else images a second or batches."""
    one = Ratio(row, ratio.peer)
    value = (one.latency if row.measure == "latency" else one.speed) if row.score else None
    return "" if value is None else f"{value:.2f}"


def _remarks(row: Row) -> list[str]:
    found = [row.note] if row.note else []
    if row.finite is False:
        found.append("numbers that are not finite came up, so it does not count")
    if row.status == "partial":
        found.append(f"stopped after {row.rounds} rounds")
    if row.rounds and not row.turns_with:
        found.append("ran alone, without taking turns")
    return found


def _number(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return ""
    places = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{places}f}" if value >= 1 else f"{value:.2g}"


def _spread(row: Row) -> str:
    return "" if row.slowest is None else f"{_number(row.slowest)}–{_number(row.fastest)}"


_COST: dict[str, Callable[[Row], str]] = {
    "TFLOP/s": lambda row: _number(row.tflops),
    "ceiling": lambda row: "" if row.ceiling_share is None else f"{row.ceiling_share:.0%}",
    "GiB": lambda row: "" if row.peak_gib is None else f"{row.peak_gib:.1f}",
    "start": lambda row: "" if row.first_step_s is None else f"{row.first_step_s:.1f} s",
}
_COLUMNS: dict[str, dict[str, Callable[[Row], str]]] = {
    "throughput": {"images/s": lambda row: _number(row.images_per_s), "min–max": _spread, **_COST},
    "latency": {
        "p50": lambda row: "" if row.p50_ms is None else f"{row.p50_ms:.2f} ms",
        "p95": lambda row: "" if row.p95_ms is None else f"{row.p95_ms:.2f} ms",
        **_COST,
    },
    "largest-batch": {"largest batch": lambda row: "" if row.largest_batch is None else f"{row.largest_batch:,}"},
}
