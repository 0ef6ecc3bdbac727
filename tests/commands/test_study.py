"""`vitrail study`, `study plot` and `study results` on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.study.made_rows import made_rows
from vitrail.cli import main
from vitrail.study.definitions import STUDIES
from vitrail.study.rows import FAILED, Results
from vitrail.study.session import StudyResult


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_the_list_explains_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("study", "--list") == 0
    text = " ".join(capsys.readouterr().out.split())
    for study in STUDIES.values():
        assert f"{study.name}: {study.title.lower()} ({study.mirrors})" in text and study.about in text
    assert run("study", "--list", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == set(STUDIES)


def test_help_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("study", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in STUDIES) and "vitrail study data-size --budget 2" in text


def test_mistakes_get_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("study", "datasize", "--out", str(tmp_path)) == 2
    assert "Did you mean data-size?" in capsys.readouterr().err
    assert run("study") == 2
    assert "Which study?" in capsys.readouterr().err
    assert run("study", "plot", "all", "--out", str(tmp_path)) == 2
    assert "has no results" in capsys.readouterr().err
    page = tmp_path / "RESULTS.md"
    assert run("study", "results", str(tmp_path / "nowhere"), "--out", str(page)) == 2
    assert "nowhere has no results of a study. Name folders" in capsys.readouterr().err and not page.exists()


def test_the_end_of_a_study_fits_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table and sentences, not the Markdown of NAME.md, whose rows of ten columns a terminal breaks."""
    rows = made_rows("data-size", lambda row: 0.5, seeds=1)
    rows[0] = replace(rows[0], status=FAILED, note="the loss is not finite")
    Results(tmp_path / "data-size.csv").put(rows)
    result = StudyResult(tmp_path / "data-size.csv", (), 60.0, 0)
    monkeypatch.setattr("vitrail.study.run_study", lambda *_: result)
    monkeypatch.setenv("COLUMNS", "80")
    assert run("study", "data-size", "--out", str(tmp_path)) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and "1.0 minutes" in last
    text = " ".join(" ".join(lines).split())
    assert "BiT 100 % 49.9 % 49.9 %" in text and "Cannot tell" in text and "the loss is not finite" in text
    assert "![" not in text and "**" not in text


def test_plot_and_results_need_the_csv_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Results(tmp_path / "positions.csv").put(made_rows("positions", lambda row: 0.5, seeds=1))
    assert run("study", "plot", "positions", "--out", str(tmp_path)) == 0
    assert [file.name for file in map(Path, capsys.readouterr().out.split())] == [
        "positions.png",
        "positions.svg",
        "positions.md",
        "report.html",
    ]
    assert run("study", "results", str(tmp_path), "--out", str(tmp_path / "RESULTS.md")) == 0
    assert "### 5. Having position embeddings" in (tmp_path / "RESULTS.md").read_text()
