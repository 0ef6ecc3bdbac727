"""Write a study's figure and table, and one HTML page over all studies of a folder, from their CSV files alone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from vitrail.errors import VitrailError
from vitrail.files import atomic_file, write_text
from vitrail.inspect.page import STYLE
from vitrail.inspect.style import rendered
from vitrail.study.definitions import STUDIES, study_named
from vitrail.study.draw import draw
from vitrail.study.rows import read_rows
from vitrail.study.summary import Summary
from vitrail.study.table import AGREES, columns, left_out, markdown, outcomes, setting

REPORT = "report.html"


def summaries(folder: Path, names: Sequence[str] | None = None) -> list[Summary]:
    """Read the studies of a folder that have results, in the order in which they are listed."""
    chosen = [study_named(name) for name in names] if names is not None else list(STUDIES.values())
    found = [Summary(study, read_rows(file)) for study in chosen if (file := folder / f"{study.name}.csv").exists()]
    return [one for one in found if one.entries]


def write_outputs(folder: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Write NAME.png, NAME.svg and NAME.md of some studies, and the report of all; return the files."""
    chosen = summaries(folder, names)
    if not chosen:
        wanted = "a study" if names is None else " or ".join(names)
        raise VitrailError(f"{folder} has no results of {wanted}. Run `vitrail study NAME --out {folder}` first.")
    files = []
    for summary in chosen:
        figure = draw(summary)
        for kind in ("png", "svg"):
            files.append(folder / f"{summary.study.name}.{kind}")
            with atomic_file(files[-1]) as temporary:
                temporary.write_bytes(rendered(figure, kind))
        files.append(folder / f"{summary.study.name}.md")
        write_text(files[-1], markdown(summary))
    files.append(folder / REPORT)
    write_text(files[-1], page(summaries(folder)))
    return files


def page(every: Sequence[Summary]) -> str:
    """Build a page that needs no other file."""
    links = "".join(f'<a href="#{one.study.name}">{escape(one.study.title)}</a>' for one in every)
    overview = "".join(
        f'<tr><td><a href="#{one.study.name}">{escape(one.study.mirrors)}</a></td><td>{escape(claim)}</td>'
        f"<td>{_verdict(outcome.agrees)}</td></tr>"
        for one in every
        for claim, _, outcome in outcomes(one)
    )
    return _PAGE.format(style=STYLE + _TABLES, links=links, overview=overview, sections="".join(map(_section, every)))


def _section(summary: Summary) -> str:
    study = summary.study
    picture = base64.b64encode(rendered(draw(summary), "png")).decode()
    heading, rows = columns(summary)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
    findings = "".join(
        f"<li>{_verdict(outcome.agrees)} <b>{escape(claim)}.</b> The paper ({escape(paper)}). Here: {escape(outcome.ours)}."
        f"{f' <i>{escape(outcome.why)}.</i>' if outcome.why else ''}</li>"
        for claim, paper, outcome in outcomes(summary)
    )
    notes = [f"Failed: {row.series} {row.label}, seed {row.seed}: {row.note}" for row in summary.failed]
    notes += left_out(summary)
    callout = f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""
    commands = "<br>".join(escape(one) for one in dict.fromkeys(row.command for row in summary.rows))
    return (
        f'<section id="{study.name}"><h2>{escape(study.title)} <span class="badge paper">{escape(study.mirrors)}</span></h2>'
        f"<p>{escape(study.about)}</p>"
        f'<figure><span class="sheet"><img src="data:image/png;base64,{picture}" alt="{escape(study.title)}"></span></figure>'
        f'<ul class="findings">{findings}</ul>{callout}'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<figcaption>{escape(' '.join(setting(summary.rows, study)))}</figcaption><p><code>{commands}</code></p></section>"
    )


def _verdict(agrees: str) -> str:
    return f'<span class="verdict {agrees}">{AGREES[agrees]}</span>'


_TABLES = """
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
.wide td { white-space: nowrap; } th { color: var(--faint); font-weight: 500; }
.findings { padding: 0; list-style: none; } .findings li { margin: .6rem 0; }
.verdict { font-size: .75rem; padding: .1rem .5rem; border-radius: 1rem; white-space: nowrap; border: 1px solid; }
.verdict.yes { color: #1a7f4b; } .verdict.partly { color: #9a6700; } .verdict.no { color: #b3261e; }
.verdict.unclear { color: var(--faint); }
code { font-size: .85rem; }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Studies of the ViT paper, repeated in small</title><style>{style}</style></head>
<body><header><h1>Studies of the ViT paper, repeated in small</h1><nav>{links}</nav></header>
<main><p>Experiments of “An Image is Worth 16x16 Words” (Dosovitskiy et al., 2021) with small models and small data: what the paper
found, and whether these results agree.</p>
<div><table><tbody>{overview}</tbody></table></div>{sections}</main>
<footer>Made with Vitrail from the CSV files in this folder: <code>vitrail study plot all</code>.</footer></body></html>
"""
