"""The page that a run ends with."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from PIL import Image

import vitrail
from tests.commands.test_train import SHORT, run
from vitrail.api import run_report
from vitrail.api.run_report import write_run_report
from vitrail.evaluate.settings import no_progress
from vitrail.train.result import Result


def train(capsys: pytest.CaptureFixture[str], out: Path, *more: str) -> tuple[int, str, str]:
    return run(capsys, "train", "digits", *(word for word in SHORT if word != "--no-report"), "--out", str(out), *more)


@pytest.mark.slow
def test_a_run_ends_with_a_page_of_its_validation_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    status, said, err = train(capsys, out)
    page = out / "evaluation" / "report.html"
    assert status == 0 and f"report: {page}" in said, err
    html = page.read_text(encoding="utf-8")
    assert "evaluated 359/359 unique images" in html and "<h2>Training" in html and "digits, 3 steps" in html
    found = json.loads((out / "evaluation" / "metrics.json").read_text())["results"][0]["metrics"]
    opened = vitrail.open_run(out)
    assert found["accuracy"] == pytest.approx(opened.result.metrics["accuracy"]) and opened.report == page
    assert opened.summary()["report"] == str(page)

    before = page.stat().st_mtime_ns
    assert f"report: {page}" in train(capsys, out)[1] and page.stat().st_mtime_ns == before, "it is not made again"
    page.unlink()
    (out / "evaluation" / "confusion.csv").unlink()
    (page.parent / "notes.txt").write_text("mine")
    status, said, _ = train(capsys, out)
    assert status == 0 and "could not be written" in said and "other files" in " ".join(said.split())
    for file in page.parent.iterdir():
        file.unlink()
    answer = json.loads(train(capsys, out, "--json")[1])
    assert answer["report"] == str(page) and page.is_file() and answer["finished"]

    note = page.parent / "notes.txt"
    note.write_text("mine")
    status, said, _ = train(capsys, out, "--steps", "4", "--allow-change", "steps")
    assert status == 0 and "has other files (notes.txt)" in " ".join(said.split()) and note.read_text() == "mine"
    assert "digits, 3 steps" in page.read_text(encoding="utf-8") and "report:" not in said
    note.unlink()
    status, said, _ = train(capsys, out, "--steps", "4", "--allow-change", "steps")
    assert status == 0 and "digits, 4 steps" in page.read_text(encoding="utf-8")


def test_no_page_is_written_unasked(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    status, said, _ = train(capsys, out, "--no-report")
    assert status == 0 and "report:" not in said and not (out / "evaluation").exists()
    result = vitrail.open_run(out).result
    assert result is not None
    interrupted = Result(out, 2, "accuracy", {"accuracy": 0.5}, ended_by=15)
    assert write_run_report(interrupted, lambda total: pytest.fail("evaluated")) is None
    monkeypatch.setenv("RANK", "1")
    assert write_run_report(result, lambda total: pytest.fail("evaluated")) is None
    assert not (out / "evaluation").exists() and vitrail.open_run(out).report is None


@pytest.mark.slow
def test_whatever_fails_the_run_is_finished(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*words: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(run_report, "write_report", fails)
        status, said, _ = train(capsys, tmp_path / "run")
    text = " ".join(said.split())
    assert status == 0 and "but its evaluation page could not be written: RuntimeError: out of memory" in text
    assert "vitrail eval" in text and vitrail.open_run(tmp_path / "run").result is not None


@pytest.mark.slow
def test_a_large_set_is_evaluated_in_part(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "MAX_IMAGES", 50)
    assert train(capsys, tmp_path / "run")[0] == 0
    html = (tmp_path / "run" / "evaluation" / "report.html").read_text(encoding="utf-8")
    assert "evaluated 50/50 unique images" in html and "50 evenly spaced images of the 359 in val, to save time" in html


@pytest.mark.slow
def test_a_run_without_validation_images_has_no_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / "train" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), 20 * number).save(tmp_path / "photos" / "train" / name / f"{number}.png")
    status, said, err = train(capsys, tmp_path / "run", "--data", str(tmp_path / "photos"), "--batch", "4", "--workers", "0")
    assert status == 0, err
    assert "report:" not in said and not (tmp_path / "run" / "evaluation").exists()


@pytest.mark.slow
def test_a_masked_run_ends_with_reconstructions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, said, err = train(capsys, tmp_path / "run", "--task.kind", "masked-patch")
    page = tmp_path / "run" / "evaluation" / "index.html"
    assert status == 0 and f"report: {page}" in said and page.is_file(), err
    before = page.stat().st_mtime_ns
    assert f"report: {page}" in train(capsys, tmp_path / "run", "--task.kind", "masked-patch")[1]
    assert page.stat().st_mtime_ns == before


@pytest.mark.slow
def test_python_writes_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(capsys, tmp_path / "start", "--no-report")[0] == 0
    done = vitrail.finetune(tmp_path / "start", "digits", steps=2, batch=16, out=tmp_path / "run", progress=False)
    assert done.report == tmp_path / "run" / "evaluation" / "report.html" and done.report.is_file()
    none = vitrail.finetune(tmp_path / "start", "digits", steps=2, batch=16, out=tmp_path / "none", progress=False, report=False)
    assert none.report is None
    assert write_run_report(none.result, lambda total: nullcontext(no_progress)) == tmp_path / "none/evaluation/report.html"
