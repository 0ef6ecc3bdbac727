"""`vitrail predict`, as a user types it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, checkpoint, photos  # noqa: F401 - fixtures


def test_one_line_per_image(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path) -> None:  # noqa: F811
    file = photos / "val" / "red" / "red000.jpg"
    status, out, err = run(capsys, "predict", checkpoint, file, photos / "val" / "blue", "--top", "2")
    lines = out.splitlines()
    assert status == 0 and err == "" and len(lines) == 10
    assert lines[0].startswith(f"{file}: ") and lines[0].count("%") == 2


def test_bad_images_are_reported_and_change_the_status(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,  # noqa: F811
    photos: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "bad.jpg").write_text("no picture")
    words = ("predict", checkpoint, photos / "val" / "red", tmp_path / "bad.jpg")
    status, out, err = run(capsys, *words, "--csv", tmp_path / "predictions.csv")
    assert status == 1 and out == "" and "bad.jpg: a text file" in err and "1 of 10 images could not be read" in err
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert len(rows) == 10 and "text file" in rows[-1]["error"] and rows[-1]["label_1"] == ""
    assert float(rows[0]["probability_1"]) >= float(rows[0]["probability_2"]) and rows[0]["label_1"] in (
        "red",
        "yellow",
        "green",
        "blue",
    )
    status, _, err = run(capsys, *words, "--csv", tmp_path / "none.csv", "--bad-images", "error")
    assert status == 2 and "bad.jpg" in err and not (tmp_path / "none.csv").exists()


def test_json_lines(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path) -> None:  # noqa: F811
    status, out, _ = run(capsys, "predict", checkpoint, photos / "val" / "green", "--json", "--top", "1")
    found = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(found) == 9 and all(len(one["predictions"]) == 1 for one in found)
    status, out, _ = run(capsys, "predict", checkpoint, photos / "val" / "green", "--csv", "-", "--top", "1")
    assert status == 0 and [row["label_1"] for row in csv.DictReader(out.splitlines())] == [
        one["predictions"][0]["label"] for one in found
    ]


def test_mistakes_give_clear_messages(capsys: pytest.CaptureFixture[str], checkpoint: Path, backbone: Path, photos: Path) -> None:  # noqa: F811
    status, _, err = run(capsys, "predict", backbone, photos)
    assert status == 2 and "only a backbone" in err
    status, _, err = run(capsys, "predict", checkpoint, "nowhere.jpg")
    assert status == 2 and "no file or folder nowhere.jpg" in err
    for command in (("predict",), ("embed", "--out", "x.npz")):
        status, _, err = run(capsys, *command, "runs/nosuch", "nowhere.jpg")
        assert status == 2 and "There is no checkpoint 'runs/nosuch'" in err
    status, _, err = run(capsys, "predict", checkpoint)
    assert status == 2 and "No image was given" in err
    status, _, err = run(capsys, "predict", checkpoint, photos, "--json", "--csv", "x.csv")
    assert status == 2 and "choose one" in err
