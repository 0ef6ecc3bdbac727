"""`vitrail study`, `study plot` and `study results` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.study.made_rows import made_rows
from vitrail.cli import main
from vitrail.study.definitions import STUDIES
from vitrail.study.rows import Results


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
