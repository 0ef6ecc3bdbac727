"""What commands write: nothing unasked, nothing over a file, and a message where a path cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.commands.test_help import options_of
from tests.commands.test_models import run
from vitrail.commands.table import COMMANDS

MODEL = "vitrail-ti8-tiny-imagenet"
# The words of a command that writes to OUT; `red.png` and `photos` are there.
WRITES = {
    "convert": [MODEL, "OUT"],
    "export": [MODEL, "OUT", "--format", "pt2"],
    "explore": ["red.png", "--save", "OUT"],
    "train": ["digits", "--steps", "1", "--out", "OUT"],
    "finetune": ["--from", MODEL, "--data", "photos", "--steps", "1", "--out", "OUT"],
    "eval": [MODEL, "--data", "photos", "--out", "OUT"],
    "reproduce": [MODEL, "--imagenet", "photos", "--csv", "OUT"],
    "fewshot": [MODEL, "--data", "photos", "--out", "OUT"],
    "probe": [MODEL, "--data", "photos", "--out", "OUT"],
    "vtab": [MODEL, "--root", "vtab", "--out", "OUT"],
    "predict": ["red.png", "--csv", "OUT"],
    "embed": [MODEL, "red.png", "--out", "OUT"],
    "neighbours": ["none.npz", "--sheet", "OUT"],
    "inspect": ["red.png", "--out", "OUT"],
    "study": ["shape", "--budget", "0.01", "--out", "OUT"],
    "study plot": ["all", "--out", "OUT"],
    "study results": ["photos", "--out", "OUT"],
    "bench": ["--model", "Ti/16", "--image-size", "32", "--batch", "1", "--device", "cpu", "--out", "OUT"],
    "data check": ["photos", "--sheet", "OUT"],
    "data split": ["photos", "OUT"],
    "data pack": ["photos", "OUT", "--image-size", "8"],
    "data sheet": ["digits", "--out", "OUT"],
    "doctor": ["--report", "OUT"],
}
FILES = ("predict", "embed", "neighbours", "explore", "fewshot", "probe", "reproduce", "data check", "data sheet")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (12, 12), (80 * number, 30, 200)).save(tmp_path / "photos" / name / f"{number}.png")
    Image.new("RGB", (12, 12), (200, 30, 30)).save(tmp_path / "red.png")
    (tmp_path / "file").write_text("a file")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(name: str, out: str) -> list[str]:
    return [*name.split(), *(out if word == "OUT" else word for word in WRITES[name])]


def test_every_command_that_writes_is_tested() -> None:
    writing = {"--out", "--csv", "--save", "--sheet", "--report"}
    found = {
        name for name in COMMANDS if any(writing & set(option.flags) or option.metavar == "OUT" for option in options_of(name))
    }
    assert found == set(WRITES)


@pytest.mark.parametrize("name", WRITES)
def test_a_path_below_a_file_is_an_error_in_one_sentence(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = "file/out.npz" if name == "embed" else "file/out.csv" if name == "data split" else "file/out"
    before = sorted(path for path in place.rglob("*"))
    status, _, err = run(capsys, *words_of(name, out))
    assert status == 2 and f"vitrail: {out}" in err and "is not a folder" in err, err
    assert sorted(path for path in place.rglob("*")) == before and (place / "file").read_text() == "a file"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_not_replaced_unasked(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = place / "there.npz"
    file.write_text("mine")
    status, _, err = run(capsys, *words_of(name, str(file)))
    assert status == 2 and "exists already" in err and "--overwrite" in err and file.read_text() == "mine"
    assert "--overwrite" in {flag for option in options_of(name) for flag in option.flags}


@pytest.mark.parametrize("command", ["embed", "predict"])
def test_shards_are_resumed_not_replaced(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, command, "none.npz", "photo.png", "--out", str(tmp_path / "shards"), "--overwrite")
    assert status == 2 and "delete" in err and not (tmp_path / "shards").exists()


@pytest.mark.parametrize("option", [("--format", "parquet"), ("--shard-size", "5")])
@pytest.mark.parametrize("name", ["embed", "predict"])
def test_options_of_shards_are_refused_for_one_file(
    name: str, option: tuple[str, str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *words_of(name, "out.npz"), *option)
    assert status == 2 and f"{' '.join(option)} is for shards" in err and not (place / "out.npz").exists()
