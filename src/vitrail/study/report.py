"""Write a study's figure and table, and one HTML page over all studies of a folder, from their CSV files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.drawing.page import Block, Commands, Finding, Findings, Notes, Page, PageSection, Paragraph, Plot, Table
from vitrail.drawing.style import rendered
from vitrail.errors import VitrailError, counted
from vitrail.files import atomic_file, write_text
from vitrail.study.definitions import STUDIES, study_named
from vitrail.study.draw import draw
from vitrail.study.rows import read_rows
from vitrail.study.summary import Summary
from vitrail.study.table import AGREES, columns, markdown, notes, outcomes, setting

REPORT = "report.html"


def summaries(folder: Path, names: Sequence[str] | None = None) -> list[Summary]:
    """Read the studies of a folder that have results, in the order in which they are listed."""
    return [one for one in _read(folder, names) if one.entries]


def _read(folder: Path, names: Sequence[str] | None) -> list[Summary]:
    chosen = [study_named(name) for name in names] if names is not None else list(STUDIES.values())
    return [Summary(study, read_rows(file)) for study in chosen if (file := folder / f"{study.name}.csv").exists()]


def write_outputs(folder: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Write NAME.png, NAME.svg and NAME.md of some studies, and the report of all; return the files."""
    chosen = summaries(folder, names)
    if not chosen:
        wanted = "a study" if names is None else " or ".join(names)
        failed = [row for one in _read(folder, names) for row in one.failed]
        cure = f"Run `vitrail study {names[0] if names else 'NAME'} --out {folder}` first."
        if failed:
            cure = (
                f"{counted(len(failed), 'row')} failed, the first with: {failed[0].note} Run the study again with --retry-failed."
            )
        raise VitrailError(f"{folder} has no results of {wanted}. {cure}")
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
    return Page(
        title="Studies of the ViT paper, repeated in small",
        links=[(one.study.name, one.study.title) for one in every],
        intro="Experiments of “An Image is Worth 16x16 Words” (Dosovitskiy et al., 2021) with small models and small data: what "
        "the paper found, and whether these results agree.",
        overview=[
            Finding(claim, outcome.agrees, AGREES[outcome.agrees], paper=one.study.mirrors, anchor=one.study.name)
            for one in every
            for claim, _, outcome in outcomes(one)
        ],
        sections=[_section(one) for one in every],
        footer="Made with Vitrail from the CSV files in this folder: vitrail study plot all.",
    ).html()


def _section(summary: Summary) -> PageSection:
    study = summary.study
    findings = [
        Finding(claim, outcome.agrees, AGREES[outcome.agrees], paper, outcome.ours, outcome.why)
        for claim, paper, outcome in outcomes(summary)
    ]
    blocks: list[Block] = [
        Paragraph(study.about),
        Plot(rendered(draw(summary), "png"), study.title),
        Findings(findings),
        *([Notes(missing)] if (missing := notes(summary)) else []),
        Table(*columns(summary)),
        Paragraph(" ".join(setting(summary.rows, study)), faint=True),
        Commands(list(dict.fromkeys(row.command for row in summary.rows))),
    ]
    return PageSection(study.title, blocks, anchor=study.name, badge=study.mirrors)
