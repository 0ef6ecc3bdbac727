"""Figures, tables, the report and RESULTS.md, from CSV files alone."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.study.made_rows import made_rows, plan_of
from vitrail.errors import VitrailError
from vitrail.study.claims import BEGIN, END, results, write_results
from vitrail.study.definitions import STUDIES
from vitrail.study.draw import draw
from vitrail.study.plan import left_out_rows
from vitrail.study.report import summaries, write_outputs
from vitrail.study.rows import FAILED, Results
from vitrail.study.summary import Summary
from vitrail.study.table import markdown

ROOT = Path(__file__).parents[2]


def write(folder: Path, name: str, seeds: int = 2) -> None:
    Results(folder / f"{name}.csv").put(made_rows(name, lambda row: 0.5 + 0.01 * row.point.priority, seeds=seeds))


@pytest.mark.slow
def test_every_study_is_drawn(tmp_path: Path) -> None:
    for name in STUDIES:
        write(tmp_path, name)
    files = write_outputs(tmp_path)
    assert {file.name for file in files} == {f"{name}.{kind}" for name in STUDIES for kind in ("png", "svg", "md")} | {
        "report.html"
    }
    page = (tmp_path / "report.html").read_text()
    assert page.count("<section ") == 8 and page.count("data:image/png;base64,") == 8
    assert set(re.findall(r'src="([a-z]+:)', page)) == {"data:"} and "<link" not in page and "<script" not in page
    before = {file: file.read_bytes() for file in files}
    assert all(file.read_bytes() == before[file] for file in write_outputs(tmp_path))  # the same rows give the same files


@pytest.mark.parametrize("name", ["compute", "shape"])
def test_powers_of_ten_are_plain_text(name: str) -> None:
    figure = draw(Summary(STUDIES[name], made_rows(name, lambda row: 0.5)))
    figure.canvas.draw()
    labels = [label.get_text() for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_xticklabels(minor=True))]
    assert any(re.fullmatch(r"\de\+\d\d", label) for label in labels) and not any("$" in label for label in labels)


@pytest.mark.parametrize("name", STUDIES)
def test_a_title_is_not_wider_than_its_figure(name: str) -> None:
    rows = made_rows(name, lambda row: 0.5)
    for data, target in (
        ("packed:TINY", "packed:CIFAR"),
        ("folder:photos-of-two-summers-at-the-lake", "torchvision:OxfordIIITPet"),
    ):
        figure = draw(Summary(STUDIES[name], [dataclasses.replace(row, data=data, target=target) for row in rows]))
        figure.canvas.draw()
        (title,) = figure.texts
        assert title.get_window_extent().x1 <= figure.bbox.x1, title.get_text()


def test_a_table_shows_means_what_failed_and_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, "positions", seeds=3)
    plan = plan_of("positions", budget=2.0)
    short = dataclasses.replace(plan, kept=(0, 1, 2, 3))
    file = Results(tmp_path / "positions.csv")
    failed = plan.rows()[0].row(plan.settings, status=FAILED, note="the loss is not finite")
    file.put([*left_out_rows(short), dataclasses.replace(failed, key="other", seed=7)])
    write_outputs(tmp_path, ["positions"])
    text = (tmp_path / "positions.md").read_text()
    assert "| 1-d learned | ViT-Ti/4 | 50.0 ± 0.1 % |" in text
    assert "Failed: ViT none, seed 7: the loss is not finite" in text
    assert "Left out, since the budget of 2 minutes was too short: ViT 2-d fixed." in text
    assert "vitrail study positions --seeds 3" in text
    assert "± is the standard deviation over seeds" in text


def test_a_shared_point_is_part_of_every_line() -> None:
    summary = Summary(STUDIES["shape"], made_rows("shape", lambda row: 0.5))
    labels = {series: [entry.label for entry, _, _ in summary.line(series, "finetuned")] for series in ("depth", "patch size")}
    assert labels == {"depth": ["×½", "×1", "×2"], "patch size": ["×2", "×1", "×½"]}


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match=r"has no results of a study. Run `vitrail study NAME"):
        write_outputs(tmp_path)
    with pytest.raises(VitrailError, match="has no results of compute"):
        write_outputs(tmp_path, ["compute"])


def test_a_study_of_failed_rows_says_why_they_failed(tmp_path: Path) -> None:
    rows = made_rows("compute", lambda row: 0.5)
    note = "The loss is not finite."
    Results(tmp_path / "compute.csv").put(dataclasses.replace(row, status=FAILED, note=note) for row in rows)
    with pytest.raises(VitrailError, match=r"no results of compute. 81 rows failed, the first with: The loss .* --retry-failed"):
        write_outputs(tmp_path, ["compute"])


def test_results_are_written_between_the_marks(tmp_path: Path) -> None:
    write(tmp_path / "one", "data-size")
    page = tmp_path / "RESULTS.md"
    page.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n\nMore.\n")
    write_results(page, [tmp_path / "one"])
    text = page.read_text()
    assert text.startswith("# Mine\n") and text.endswith("\n\nMore.\n") and "old" not in text
    assert len(re.findall(r"^### \d\. ", text, re.MULTILINE)) == 8
    assert "[rows](one/data-size.csv)" in text and "`vitrail study data-size --seeds 2`" in text
    assert text.count("Ours: not measured") == 7
    write_results(page, [tmp_path / "one"])
    assert page.read_text() == text
    page.write_text("no marks")
    with pytest.raises(VitrailError, match="lacks the lines"):
        write_results(page, [tmp_path / "one"])


def test_the_committed_results_are_what_the_committed_rows_give() -> None:
    """RESULTS.md and the tables are generated: nothing in them is written by hand, and nothing is out of date."""
    folders = sorted(one for one in (ROOT / "docs" / "results" / "studies").glob("*") if one.is_dir())
    assert results(folders, ROOT) in (ROOT / "RESULTS.md").read_text(), "run vitrail study results"
    for folder in folders:
        for summary in summaries(folder):
            assert (folder / f"{summary.study.name}.md").read_text() == markdown(summary), (
                f"run vitrail study plot all --out {folder}"
            )
