from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.data.image_files import encoded, folder_of, picture
from vitrail.cli import main
from vitrail.data import open_source


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "photos", {"train/cat": 4, "train/dog": 3, "val/dog": 2})


def test_check_of_a_good_dataset(photos: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    assert run("data", "check", photos, "--sheet", sheet) == 0
    shown = capsys.readouterr().out
    for words in ("folder (split folders): train 7, val 2 images; 2 classes", "40×48", "RGB", "No problems found."):
        assert words in shown
    assert "val has no image of 1 of 2 classes: cat." in shown
    assert sheet.exists()


def test_check_reports_problems_as_json(photos: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (photos / "train/cat/empty.jpg").write_bytes(b"")
    (photos / "val/dog/copy.png").write_bytes((photos / "train/cat/0.png").read_bytes())
    assert run("data", "check", photos, "--sheet", tmp_path / "s.png", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [problem["kind"] for problem in found["problems"]] == ["unreadable", "duplicates"]
    assert found["problems"][0]["items"] == ["train/cat/empty.jpg: an empty file (0 bytes)"]
    assert found["splits"]["train"]["per_class"] == {"cat": 5, "dog": 3}
    assert found["contact_sheet"] == str(tmp_path / "s.png")
    assert run("data", "check", photos) == 1
    shown = capsys.readouterr().out
    assert "problem train: 1 of 8 images cannot be used." in shown
    assert "train/cat/0.png ~ val/dog/copy.png" in shown
    assert "Contact sheet" not in shown


def test_check_continues_after_an_unknown_class(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(photos, {"val/eel": 1})
    (photos / "train/cat/empty.jpg").write_bytes(b"")
    assert run("data", "check", photos, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [problem["kind"] for problem in found["problems"]] == ["source", "unreadable"]
    assert "val has class 'eel', which the training split does not have" in found["problems"][0]["message"]


def test_check_of_a_wrong_layout_shows_the_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path / "loose", {".": 2})
    assert run("data", "check", tmp_path / "loose") == 1
    shown = capsys.readouterr().out
    assert "contains 2 images but no class folders" in shown
    assert "DIR/train/cat/1.jpg" in shown


@pytest.mark.parametrize("source", ["folder", "table"])
def test_split_writes_a_table_that_opens_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    root = folder_of(tmp_path / "photos", {"cat": 20, "dog": 40})
    reference = str(root)
    if source == "table":
        rows = [f"{file.relative_to(tmp_path)},{file.parent.name}\n" for file in sorted(root.rglob("*.png"))]
        (tmp_path / "all.csv").write_text("path,label\n" + "".join(rows))
        reference = f"csv:{tmp_path}/all.csv"
    table = tmp_path / "split.csv"
    assert run("data", "split", reference, table, "--val", "0.1", "--test", "0.2") == 0
    assert f"{table}: train 42, val 6, test 12 images. Use it as csv:{table}" in capsys.readouterr().out
    opened = open_source(f"csv:{table}")
    assert {name: len(split) for name, split in opened.splits.items()} == {"train": 42, "val": 6, "test": 12}
    split = opened.splits["test"]
    for k in range(len(split)):
        assert f"/{split.classes[split.targets[k]]}/" in split.image_name(k)
        assert split.payload(k) == (tmp_path / split.image_name(k)).read_bytes()
    everything = [part.image_name(k) for part in opened.splits.values() for k in range(len(part))]
    assert len(set(everything)) == 60
    assert not list(root.glob("vitrail-split*"))
    assert run("data", "split", reference, table) == 2
    assert "already exists" in capsys.readouterr().err


def test_split_of_a_folder_with_a_question_mark_in_its_name(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "who?", {"cat": 4, "dog": 4})
    assert run("data", "split", root, tmp_path / "split.csv", "--val", "0.25") == 0
    assert {name: len(split) for name, split in open_source(str(tmp_path / "split.csv")).splits.items()} == {"train": 6, "val": 2}


def test_split_keeps_existing_splits(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "split", photos, tmp_path / "s.csv") == 2
    assert "already has a split 'val'" in capsys.readouterr().err
    assert run("data", "split", photos, tmp_path / "s.csv", "--val", "0", "--test", "0.3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["splits"] == {"train": 5, "val": 2, "test": 2}
    assert run("data", "split", "digits", tmp_path / "d.csv") == 2
    assert run("data", "split", photos, tmp_path / "t.csv", "--val", "0.7", "--test", "0.3") == 2
    assert "expected fractions from 0 to below 1" in capsys.readouterr().err


def test_pack_and_use(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "packed"
    assert run("data", "pack", photos, folder, "--image-size", "32") == 0
    shown = capsys.readouterr().out
    assert f"{folder}: train 7, val 2 images" in shown
    assert "checksums verified" in shown
    assert f"Use it as packed:{folder}" in shown
    arrays = open_source(f"packed:{folder}").splits["train"].arrays
    assert arrays is not None
    assert arrays.shape == (7, 32, 32, 3)
    assert run("data", "check", folder) == 0


def test_pack_skips_bad_images_if_requested(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "train/cat/text.jpg").write_text("not an image")
    assert run("data", "pack", photos, tmp_path / "p", "--image-size", "32") == 2
    error = capsys.readouterr().err
    assert "train/cat/text.jpg: a text file, not an image" in error
    assert "--bad-images skip" in error
    assert run("data", "pack", photos, tmp_path / "q", "--image-size", "16", "24", "--bad-images", "skip", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["splits"] == {"train": 7, "val": 2}
    assert result["size"] == [16, 24]
    assert result["skipped"][0][0] == "train/cat/text.jpg"


def test_markup_in_names_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = folder_of(tmp_path / "set", {"train/[red]cat": 2, "train/dog": 2})
    (root / "train/[red]cat/bad[1].jpg").write_bytes(encoded(picture(0))[:20])
    assert run("data", "check", root) == 1
    shown = capsys.readouterr().out
    assert "train/[red]cat/bad[1].jpg" in shown


def test_sheet_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "digits.png"
    options = ["--augment.randaugment", "timm", "--augment.mix-until", "0.5", "--rows", "3", "--columns", "2", "--json"]
    code = run("data", "sheet", "digits", *options, "--out", str(file))
    shown = json.loads(capsys.readouterr().out)
    assert code == 0 and shown["out"] == str(file) and shown["augment"]["randaugment"] == "timm"
    assert Image.open(file).size[0] > 3 * 100
    assert run("data", "sheet", "deit-s16-imagenet") == 2
    assert "add --data" in capsys.readouterr().err
