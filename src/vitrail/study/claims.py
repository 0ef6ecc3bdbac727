"""RESULTS.md: the paper's eight claims, its values, ours and the command, written from the CSV files of any number of folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import VitrailError, counted
from vitrail.files import write_text
from vitrail.study.definition import Finding, Outcome
from vitrail.study.definitions import STUDIES
from vitrail.study.report import summaries
from vitrail.study.summary import Summary
from vitrail.study.table import AGREES

BEGIN, END = "<!-- begin: vitrail study results -->", "<!-- end: vitrail study results -->"
_NOT_MEASURED = "not measured"


def write_results(page: Path, folders: Sequence[Path]) -> None:
    """Replace what is between the two marks of a page by the results of these folders."""
    text = page.read_text(encoding="utf-8") if page.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise VitrailError(f"{page} lacks the lines {BEGIN} and {END}, between which results are written. Add them.")
    write_text(page, f"{before}{BEGIN}\n{results(folders, page.parent)}{END}{after}")


def results(folders: Sequence[Path], root: Path) -> str:
    """Return an overview, then each claim with the results of every folder."""
    measured = {folder: {one.study.name: one for one in summaries(folder)} for folder in folders}
    claims = sorted(
        ((finding, study.name) for study in STUDIES.values() for finding in study.findings if finding.number),
        key=lambda one: one[0].number or 0,
    )
    if empty := [folder for folder, found in measured.items() if not found]:
        raise VitrailError(f"{empty[0]} has no results of a study. Name folders that hold CSV files of studies.")
    titles = [_data(found) for found in measured.values()]
    lines = [" | ".join(["| # | claim", *titles]) + " |", "|---" * (2 + len(titles)) + "|"]
    for finding, study in claims:
        verdicts = [_verdict(_outcome(finding, found.get(study))) for found in measured.values()]
        lines.append(" | ".join([f"| {finding.number} | {finding.claim}", *verdicts]) + " |")
    for finding, study in claims:
        lines += ["", f"### {finding.number}. {finding.claim}", "", f"The paper ({finding.where}): {finding.paper}.", ""]
        entries = [_entry(finding, found[study], folder, root) for folder, found in measured.items() if study in found]
        lines += entries or [f"Ours: {_NOT_MEASURED} (`vitrail study {study}`)."]
    return "\n".join(lines) + "\n"


def _entry(finding: Finding, summary: Summary, folder: Path, root: Path) -> str:
    outcome = _outcome(finding, summary)
    assert outcome is not None
    first = summary.entries[0].first
    why = f" ({outcome.why})" if outcome.why else ""
    try:
        shown = folder.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        shown = folder.as_posix()
    setting = f"{first.image_size} pixels, {first.hardware}, seeds: {summary.seeds}"
    rows = [row for entry in summary.entries for row in entry.rows]
    minutes = sum(row.seconds or 0 for row in rows) / 60
    run = f"{counted(len(rows), 'row')} in {minutes:.1f} minutes, {first.precision}, Vitrail {first.vitrail}, torch {first.torch}"
    links = f"[table]({shown}/{summary.study.name}.md), [rows]({shown}/{summary.study.name}.csv)"
    return (
        f"- **{first.data} → {first.target}**, {setting}, {run}, {first.date}. "
        f"{outcome.ours}. **{_verdict(outcome).capitalize()}**{why}. `{first.command}` ({links})"
    )


def _outcome(finding: Finding, summary: Summary | None) -> Outcome | None:
    return finding.judge(summary) if summary is not None else None


def _verdict(outcome: Outcome | None) -> str:
    return _NOT_MEASURED if outcome is None or outcome.ours == _NOT_MEASURED else AGREES[outcome.agrees]


def _data(found: dict[str, Summary]) -> str:
    first = next(iter(found.values())).entries[0].first
    return f"{first.data} → {first.target}"
