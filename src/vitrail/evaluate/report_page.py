"""Build the HTML of a report as one self-contained file: styles, images, and a few lines of script that sort tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vitrail.data.types import Split
from vitrail.errors import counted
from vitrail.evaluate.evaluator import EvalResult
from vitrail.evaluate.thumbnails import data_uri

METRIC_NAMES = {
    "accuracy": "accuracy",
    "top5_accuracy": "top-5 accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "real_accuracy": "ReaL accuracy",
    "nll": "negative log-likelihood",
    "ece": "expected calibration error",
    "map": "mean average precision",
    "f1_micro": "micro F1",
    "f1_macro": "macro F1",
    "exact_match": "exact match",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
}
IN_PERCENT = {"accuracy", "top5_accuracy", "balanced_accuracy", "macro_f1", "real_accuracy", "ece"}
IN_PERCENT |= {"map", "f1_micro", "f1_macro", "exact_match"}


def format_metric(name: str, value: float) -> str:
    """Format a metric for people: in per cent, or with four digits where per cent makes no sense."""
    if math.isnan(value):
        return "–"
    return f"{value:.2%}" if name in IN_PERCENT else f"{value:.4g}"


def page(result: EvalResult, split: Split, about: Mapping[str, Any], sections: Sequence[str]) -> str:
    """Build the whole page. The first metric of the result is the headline."""
    headline = next(iter(result.metrics))
    title = f"{about['checkpoint']} on {about['data']}"
    info = {
        **{name: value for name, value in about.items() if isinstance(value, str)},
        "split": f"{split.name}: evaluated {result.images}/{result.total} unique images",
        "preprocessing": result.preprocess.describe(),
        "preprocessing fingerprint": result.preprocess.fingerprint(),
    }
    rows = [[METRIC_NAMES[name], format_metric(name, value), interval_text(result, name)] for name, value in result.metrics.items()]
    return _PAGE.format(
        title=escape(title),
        style=_STYLE,
        script=_SCRIPT,
        headline=escape(format_metric(headline, result.metrics[headline])),
        headline_name=escape(METRIC_NAMES[headline]),
        headline_range=escape(f"95 % confidence interval: {interval_text(result, headline)}"),
        info="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in info.items()),
        notes=_notes(result, about.get("assumptions", ())),
        metrics=table(["metric", "value", "95 % interval"], rows),
        sections="".join(sections),
    )


def interval_text(result: EvalResult, name: str) -> str:
    """Format the interval of a metric; a dash if it has none."""
    interval = result.intervals.get(name, (math.nan, math.nan))
    return "–" if math.isnan(interval[0]) else " – ".join(format_metric(name, end) for end in interval)


def _notes(result: EvalResult, assumptions: Sequence[str]) -> str:
    loud = "".join(f"<p class='warning'>{escape(note)}</p>" for note in (result.trained_on.notes if result.trained_on else ()))
    notes = [escape(note) for note in (*result.notes, *(f"assumed: {one}" for one in assumptions))]
    if result.bad:
        listed = "".join(f"<li>{escape(one.name)}: {escape(one.reason)}</li>" for one in result.bad[:100])
        more = f"<li>and {len(result.bad) - 100} more</li>" if len(result.bad) > 100 else ""
        notes.append(f"{counted(len(result.bad), 'image')} could not be read and skipped:<ul>{listed}{more}</ul>")
    return loud + (f"<ul class='notes'>{''.join(f'<li>{note}</li>' for note in notes)}</ul>" if notes else "")


def section(title: str, body: str, file: str | None = None) -> str:
    link = f"<p class='faint'>Also in {escape(file)}, in the same folder.</p>" if file else ""
    return f"<section><h2>{escape(title)}</h2>{body}{link}</section>"


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, sortable: bool = False) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    kind = " class='sortable'" if sortable else ""
    return f"<div class='wide'><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        text = "–" if math.isnan(value) else f"{value:.3f}"
        return f"<td data-value='{-1 if math.isnan(value) else value}'>{text}</td>"
    if isinstance(value, int):
        return f"<td data-value='{value}'>{value:,}</td>"
    return f"<td>{escape(str(value))}</td>"


def plot(png: bytes, alt: str) -> str:
    """Embed a plot at two thirds of its pixels: sharp on high-resolution screens, with text of the page's size."""
    width = round(int.from_bytes(png[16:20], "big") / 1.5)
    return f"<img class='plot' width='{width}' src='{data_uri(png)}' alt='{escape(alt)}'>"


def strip(title: str, examples: Sequence[tuple[str, str]]) -> str:
    """Show a row of thumbnails (data URI, caption) under an HTML title. An empty URI means that the image cannot be read."""
    thumbnails = "".join(
        f"<img src='{uri}' title='{escape(caption, quote=True)}' alt='{escape(caption, quote=True)}'>"
        if uri
        else "<i>unreadable</i>"
        for uri, caption in examples
    )
    return f"<div class='strip'><p>{title}</p>{thumbnails}</div>"


_STYLE = """
:root { color-scheme: light; --ink: #24292f; --faint: #6a737d; --line: #e3e6ea; --blue: #2f5d8a; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; }
body { margin: 0 auto; padding: 2rem 1.5rem; max-width: 60rem; }
h1 { font-size: 1.35rem; margin: 0 0 1.2rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .8rem; }
.top { display: flex; flex-wrap: wrap; gap: 2.5rem; align-items: flex-start; }
.headline b { display: block; font-size: 3rem; line-height: 1.1; color: var(--blue); font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; flex: 1 1 24rem; }
dt, .faint { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; } .faint { font-size: .85rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .9rem .28rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--faint); font-weight: 500; }
.sortable th { cursor: pointer; } .sortable th:hover { color: var(--ink); }
.sortable th[data-order]::after { content: " ↓"; } .sortable th[data-order="up"]::after { content: " ↑"; }
.plot { display: block; max-width: 100%; height: auto; margin-top: .8rem; } .notes { color: var(--faint); padding-left: 1.1rem; }
.warning { color: #a40e26; font-weight: 600; border-left: 4px solid; padding-left: .8rem; }
.strip { margin: 0 0 1rem; } .strip p { margin: 0 0 .3rem; }
.strip img { width: 96px; height: 96px; object-fit: contain; margin-right: 4px; }
.strip i { display: inline-block; width: 96px; color: var(--faint); }
"""
_SCRIPT = """
document.querySelectorAll('table.sortable th').forEach(head => head.addEventListener('click', () => {
  const table = head.closest('table'), column = [...head.parentNode.children].indexOf(head), up = head.dataset.order === 'down';
  table.querySelectorAll('th').forEach(other => delete other.dataset.order);
  head.dataset.order = up ? 'up' : 'down';
  const content = cell => 'value' in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  const value = row => content(row.children[column]);
  const rows = [...table.tBodies[0].rows].sort((a, b) => { const x = value(a), y = value(b); return x < y ? -1 : x > y ? 1 : 0; });
  (up ? rows : rows.reverse()).forEach(row => table.tBodies[0].append(row));
}));
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
<div class="top">
<div class="headline"><b>{headline}</b>{headline_name}<br><span class="faint">{headline_range}</span></div>
<dl>{info}</dl></div>
{notes}
<section><h2>Metrics</h2>{metrics}</section>
{sections}
<script>{script}</script></body></html>
"""
