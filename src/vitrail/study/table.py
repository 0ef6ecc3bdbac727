"""A study's results as a Markdown table, with what the paper found and whether it shows here."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.errors import counted
from vitrail.study.definition import Outcome, Study
from vitrail.study.rows import Row
from vitrail.study.summary import Entry, Summary, metric_name

AGREES = {"yes": "agrees", "partly": "agrees in part", "no": "does not agree", "unclear": "cannot tell"}


def columns(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the rows of the table."""
    many = len(summary.series) > 1
    metrics = summary.metrics
    heading = [*(["series"] if many else []), "", "model", *(metric_name(one, summary.rows) for one in metrics)]
    heading += ["accuracy in pre-training", "pre-trained, epochs", "FLOPs", "minutes", "seeds"]
    return heading, [_cells(entry, many, summary) for entry in summary.entries]


def _cells(entry: Entry, many: bool, summary: Summary) -> list[str]:
    row = entry.first
    values = [value.text() if (value := entry.value(metric)) else "–" for metric in summary.metrics]
    on_source = entry.value("pretrained")
    return [
        *([entry.series] if many else []),
        entry.label,
        row.model,
        *values,
        on_source.text() if on_source else "–",
        f"{row.pretrain_epochs:.3g}" if row.pretrain_epochs is not None else "–",
        f"{row.pretrain_flops:.1e}" if row.pretrain_flops is not None else "–",
        f"{(entry.number('seconds') or 0) / 60:.2f}",
        str(len(entry.rows)),
    ]


def outcomes(summary: Summary) -> list[tuple[str, str, Outcome]]:
    """Return each finding of the paper: the claim, where it is, and what these results say."""
    return [(finding.claim, f"{finding.where}: {finding.paper}", finding.judge(summary)) for finding in summary.study.findings]


def setting(rows: Sequence[Row], study: Study) -> list[str]:
    """Return sentences on what was run, where, and at which cost."""
    done = [row for row in rows if row.seconds is not None]
    first = done[0]
    minutes = sum(row.seconds or 0 for row in done) / 60
    found = [
        f"Pre-trained on {first.data}, transferred to {first.target}; {counted(len(done), 'row')}, {minutes:.1f} minutes of "
        f"training and evaluation in all, on {first.hardware}{_side_by_side(first)}, torch {first.torch}.",
        "± is the standard deviation over seeds." if any(row.seed for row in done) else "One seed.",
    ]
    if study.few_shot and first.shots:
        found.append(
            f"{first.shots}-shot: a linear classifier on frozen features, mean over three draws of {first.shots} images per class."
        )
    return found


def _side_by_side(row: Row) -> str:
    return f", {row.processes} processes side by side" if (row.processes or 1) > 1 else ""


def notes(summary: Summary) -> list[str]:
    """Say which rows failed and which points are missing, and why."""
    failed = [f"Failed: {row.series} {row.label}, seed {row.seed}: {row.note}" for row in summary.failed]
    return [*failed, *_left_out(summary)]


def _left_out(summary: Summary) -> list[str]:
    by_reason: dict[str, dict[str, None]] = {}
    for row in summary.left_out:
        by_reason.setdefault(row.note, {})[f"{row.series} {row.label}"] = None
    return [f"Left out, since {reason or 'the budget was too short'}: {', '.join(names)}." for reason, names in by_reason.items()]


def markdown(summary: Summary) -> str:
    """Return the page of a study: figure, table, findings."""
    study = summary.study
    heading, rows = columns(summary)
    lines = [f"# {study.title}", "", f"{study.mirrors} of the paper, in small. {study.about}", ""]
    lines += [f"![{study.title}]({study.name}.png)", ""]
    lines += [" | ".join(["", *heading, ""]).strip(), "|".join(["", *("---" for _ in heading), ""])]
    lines += [" | ".join(["", *cells, ""]).strip() for cells in rows]
    lines += ["", " ".join(setting(summary.rows, study)), ""]
    for claim, paper, outcome in outcomes(summary):
        why = f" ({outcome.why})" if outcome.why else ""
        lines += [f"- **{claim}.** The paper ({paper}). Here: {outcome.ours}. **{AGREES[outcome.agrees].capitalize()}**{why}."]
    lines += [f"- {note}" for note in notes(summary)]
    commands = dict.fromkeys(row.command for row in summary.rows)
    lines += ["", "```", *commands, f"vitrail study plot {study.name}", "```"]
    return "\n".join(lines) + "\n"
