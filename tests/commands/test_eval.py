"""`vitrail eval`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluate.conftest import backbone, checkpoint, photos  # noqa: F401 - fixtures
from vitrail.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.mark.slow
def test_a_table_and_a_report(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ("eval", checkpoint, "--data", f"folder:{photos}", "--out", tmp_path / "report")
    status, out, _ = run(capsys, *words)
    assert (
        status == 0 and "evaluated 36/36 unique images" in out and "balanced accuracy" in out and "preprocessing: google-vit" in out
    )
    assert (tmp_path / "report" / "report.html").is_file() and (tmp_path / "report" / "confusion.png").is_file()
    status, _, err = run(capsys, *words)
    assert status == 2 and "contains a report. Pass --overwrite" in err and "Traceback" not in err
    assert run(capsys, *words, "--overwrite")[0] == 0


def test_json_at_several_sizes(capsys: pytest.CaptureFixture[str], checkpoint: Path, photos: Path) -> None:  # noqa: F811
    status, out, _ = run(capsys, "eval", checkpoint, "--data", photos, "--split", "train", "--image-sizes", "32", "48", "--json")
    found = json.loads(out)
    assert status == 0 and [one["size"] for one in found["results"]] == [[32, 32], [48, 48]] and found["split"] == "train"
    assert all(one["images"] == one["total_images"] == 48 for one in found["results"])


def test_mistakes_give_clear_messages(capsys: pytest.CaptureFixture[str], checkpoint: Path, backbone: Path, photos: Path) -> None:  # noqa: F811
    status, _, err = run(capsys, "eval", backbone, "--data", photos)
    assert status == 2 and "only a backbone" in err
    status, _, err = run(capsys, "eval", checkpoint, "--data", photos, "--split", "tset")
    assert status == 2 and "no split 'tset'" in err
    status, _, err = run(capsys, "eval", checkpoint, "--data", photos, "--real", "nowhere.json")
    assert status == 2 and "Cannot read the labels" in err
