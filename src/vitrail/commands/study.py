"""`vitrail study`: repeat the paper's studies in small, draw them, and compare them with the paper."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from vitrail.commands.options import Json
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError
from vitrail.study import STUDIES, StudySettings
from vitrail.text import to_json

Settings = Annotated[StudySettings, tyro.conf.arg(name="")]
Name = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
Folder = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER …")]


def study(
    name: Name = None,
    /,
    *,
    settings: Settings = StudySettings(),  # noqa: B008 - it is frozen
    list_: Annotated[bool, tyro.conf.arg(name="list")] = False,
    json_: Json = False,
) -> None:
    """Repeat one of the paper's studies in small: pre-train a grid of models, transfer each, draw the figure and the table.

    data-size (Fig. 3, 4), compute (Fig. 5), shape (Fig. 8), positions (Table 8, Fig. 7), pooling (Fig. 9), self-supervision
    (§4.6), resolution (§3.2), optimizer (Table 7). `vitrail study --list` explains each.

    Rows are written to OUT/NAME.csv as they finish, with all settings, FLOPs, times and versions; OUT/report.html shows all
    studies. Finished rows are never run again; run the same command again to resume. Several processes may run one study.

    Example: vitrail study data-size --budget 2

    Example: vitrail study positions --data packed:tiny --target packed:cifar10 --budget 30 --seeds 3 --jobs 4

    Example: torchrun --nproc-per-node 8 -m vitrail study compute --data folder:IMAGENET --target torchvision:CIFAR10

    Args:
        name: The study.
        settings: Data, size and length of the study.
        list_: List the studies, with what each varies and which figure of the paper it repeats.
        json_: Print JSON instead of text.
    """
    if list_:
        _list(as_json=json_)
        return
    if name is None:
        raise VitrailError(f"Which study? Name one of {', '.join(STUDIES)}; `vitrail study --list` explains them.")
    from vitrail.study import run_study  # which imports torch

    check_place(settings.out)
    result = run_study(name, settings)
    if os.environ.get("RANK", "0") != "0":
        return
    files = [str(file) for file in result.files]
    if json_:
        say(to_json({"csv": str(result.csv), "files": files, "seconds": round(result.seconds, 1), "not_started": result.late}))
        return
    console = Console()
    _show(console, result.csv.parent, name)
    budget = f" of {settings.budget:g}" if settings.budget else ""
    console.print(
        f"{result.seconds / 60:.1f}{budget} minutes; {', '.join([str(result.csv), *files])}", highlight=False, soft_wrap=True
    )


def _show(console: Console, folder: Path, name: str) -> None:
    """Print the accuracies and what they say about the paper; NAME.md and the report have the rest."""
    from vitrail.study.report import summaries
    from vitrail.study.summary import metric_name
    from vitrail.study.table import AGREES, notes, outcomes

    [summary] = summaries(folder, [name])
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("series", ""):
        table.add_column(heading)
    for metric in summary.metrics:
        table.add_column(metric_name(metric, summary.rows), justify="right")
    for entry in summary.entries:
        values = (entry.value(metric) for metric in summary.metrics)
        table.add_row(entry.series, entry.label, *(value.text() if value else "–" for value in values))
    console.print(table)
    for claim, paper, outcome in outcomes(summary):
        why = f" ({outcome.why})" if outcome.why else ""
        verdict = f"{AGREES[outcome.agrees].capitalize()}{why}."
        console.print(f"{claim}. The paper ({paper}). Here: {outcome.ours}. {verdict}", highlight=False, markup=False)
    for note in notes(summary):
        console.print(note, highlight=False, markup=False)


def plot(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = "all", /, *, out: Path = Path("runs/study")
) -> None:
    """Draw a study, or all of a folder, again from the CSV files alone: figures (PNG and SVG), tables (Markdown), the HTML report.

    Example: vitrail study plot all

    Example: vitrail study plot data-size --out docs/results/studies/digits

    Args:
        name: The study, or all.
        out: The folder with the CSV files.
    """
    from vitrail.study import write_outputs

    check_place(out)
    for file in write_outputs(out, None if name == "all" else [name]):
        Console().print(str(file), highlight=False, soft_wrap=True)


def results(folders: Folder = (), /, *, out: Path = Path("RESULTS.md")) -> None:
    """Write the paper's eight claims, next to what the studies in these folders found, into a page.

    Example: vitrail study results studies/tiny-imagenet studies/digits

    Args:
        folders: Folders with CSV files of studies. Default: all in docs/results/studies.
        out: The page; what is between its two marks is replaced.
    """
    from vitrail.study.claims import write_results

    chosen = list(folders) or sorted(one for one in Path("docs/results/studies").glob("*") if one.is_dir())
    if not chosen:
        raise VitrailError("There are no folders in docs/results/studies. Name folders that hold CSV files of studies.")
    check_place(out)
    write_results(out, chosen)
    Console().print(str(out), highlight=False)


def _list(*, as_json: bool) -> None:
    if as_json:
        content = {one.name: {"title": one.title, "mirrors": one.mirrors, "about": one.about} for one in STUDIES.values()}
        say(to_json(content, indent=2))
        return
    console = Console()
    for one in STUDIES.values():
        console.print(Text.assemble((one.name, "bold"), f": {one.title.lower()} ({one.mirrors})"), highlight=False)
        for paragraph in (one.about, *(f"The paper: {finding.claim} ({finding.where})." for finding in one.findings)):
            text = textwrap.fill(paragraph, min(console.width, 100), initial_indent="  ", subsequent_indent="  ")
            console.print(text, highlight=False)
