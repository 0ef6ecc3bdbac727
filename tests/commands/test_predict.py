"""`vitrail predict`, as a user types it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from tests.commands.test_eval import run
from tests.evaluate.conftest import backbone, checkpoint, photos, tiny_model  # noqa: F401 - fixtures
from vitrail.checkpoints import save
from vitrail.data import preset


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
    assert f"wrote {tmp_path / 'predictions.csv'}: a row for each of 10 images" in err
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


def test_labels_below_their_thresholds_are_marked(
    capsys: pytest.CaptureFixture[str],
    photos: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = tiny_model(outputs=2)
    torch.nn.init.normal_(model.head.weight, std=1e-4)  # type: ignore[union-attr, arg-type]
    about = {"task": {"kind": "multilabel", "thresholds": [0.9, 0.1]}}
    save(
        tmp_path / "labels",
        model,
        preprocess=preset("google-vit", size=32),
        classes=("sea", "sky"),
        task="multilabel",
        provenance=about,
    )
    words = ("predict", tmp_path / "labels", photos / "val" / "red" / "red000.jpg", "--precision", "fp32")
    _, out, _ = run(capsys, *words)
    assert out.strip().endswith("red000.jpg: sky 50.0%; below the threshold: sea 50.0%")
    _, out, _ = run(capsys, *words, "--csv", "-")
    row = next(csv.DictReader(out.splitlines()))
    assert [row[f"{name}_{k}"] for k in (1, 2) for name in ("label", "above_threshold")] == ["sky", "1", "sea", "0"]
    _, out, _ = run(capsys, *words, "--json")
    assert [one["above_threshold"] for one in json.loads(out)["predictions"]] == [True, False]


def test_without_a_checkpoint_the_included_model_is_used_and_named(
    capsys: pytest.CaptureFixture[str],
    photos: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file, folder = photos / "val" / "red" / "red000.jpg", photos / "val" / "blue"
    (tmp_path / "list.txt").write_text(f"{file}\n")
    for words, lines in (((file,), 1), ((folder,), 9), (("list.txt",), 1), ((folder, file), 10)):
        status, out, err = run(capsys, "predict", *words, "--precision", "fp32")
        assert status == 0 and len(out.splitlines()) == lines
        assert err == "model: vitrail-ti8-tiny-imagenet (ViT-Ti/8, 64×64 pixels, 200 classes), because no checkpoint was given\n"
    status, out_by_name, err = run(capsys, "predict", "vitrail-ti8-tiny-imagenet", folder, file, "--precision", "fp32")
    assert status == 0 and err == "" and out_by_name == out


def test_checkpoint_and_images_are_told_apart(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,  # noqa: F811
    photos: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    file = photos / "val" / "red" / "red000.jpg"
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()  # a run that has not written its model yet, but has a picture
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "curves.png").write_bytes(b"")
    for words, sentence in (
        ((), "No image was given"),
        ((checkpoint,), f"No image was given, only {checkpoint}, which is read as the checkpoint"),
        (("https://login@example.com/cat.JPG?size=1",), "https://example.com/cat.JPG?… is a URL, and images are not downloaded"),
        ((checkpoint, "https://example.com/cat"), "https://example.com/cat is a URL, and images are not downloaded"),
        (("vitrail-ti8-tiny-imagenet",), "No image was given"),
        (("nowhere.jpg",), "There is no file or folder nowhere.jpg"),
        (("nowhere",), "There is no image, folder or checkpoint 'nowhere'"),
        ((file, checkpoint), "Give the checkpoint first"),
        ((tmp_path / "empty", file), "is a folder without a checkpoint's config.json"),
        ((tmp_path / "run", file), "is a run that has no model/ yet. Finish it first"),
    ):
        status, _, err = run(capsys, "predict", *words)
        assert status == 2 and sentence in err, (words, err)


def test_a_photo_that_is_not_read_is_an_image_not_a_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    status, _, err = run(capsys, "predict", "phone/IMG_1.HEIC")
    assert status == 1 and "phone/IMG_1.HEIC: a HEIC image, which Pillow cannot read; convert it to JPEG or PNG" in err
    status, _, err = run(capsys, "predict", "phone")
    assert status == 2 and "There is no image in the folder phone" in err
    for command in (("inspect", "--out", "inside"), ("explore", "--save", "page.html")):
        status, _, err = run(capsys, *command, "phone/IMG_1.HEIC")
        assert status == 2 and "a HEIC image" in err and "weight file" not in err


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
    for option, value in (("--batch", 0), ("--workers", -1)):
        status, _, err = run(capsys, "predict", checkpoint, photos, option, value)
        assert status == 2 and f"is {value}; it must be at least" in err


def test_an_empty_folder_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, "predict", tmp_path)
    assert status == 2 and f"The folder {tmp_path} is empty" in err


def test_other_sizes_and_images_that_keep_their_aspect_ratio(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,  # noqa: F811
    photos: Path,  # noqa: F811
) -> None:
    words = ("predict", checkpoint, photos / "val" / "red", "--json", "--top", "1", "--precision", "fp32")
    found = []
    for options in ((), ("--image-size", "48"), ("--image-size", "24x40"), ("--any-size",), ("--any-size", "--max-size", "32")):
        status, out, err = run(capsys, *words, *options)
        assert status == 0 and len(out.splitlines()) == 9
        found.append((out, err))
    assert len({out for out, _ in found}) == 5  # each size has an answer of its own
    assert [err for _, err in found[:3]] == [
        "",
        "image size 32×32 → 48×48, position embedding 4×4 → 6×6 resampled with rule 'reference'\n",
        "image size 32×32 → 24×40, position embedding 4×4 → 3×5 resampled with rule 'reference'\n",
    ]
    assert found[3][1] == (
        "images keep their aspect ratio: short side 32, long side up to 64, in steps of 8 pixels; position embedding resampled for "
        "each size with rule 'reference'\n"
    )
    for options, text in (
        (("--image-size", "36"), "Image 36×36 is not a multiple of patch 8. Nearest: 32×32, 40×40."),
        (("--image-size", "48,48"), "--image-size is '48,48'; it takes a number of pixels, or height and width such as 384x512."),
        (("--max-size", "64"), "Add any_size"),
        (("--any-size", "--max-size", "4"), "limited to 4 pixels, but the model's patches have 8: allow 8 or more"),
    ):
        status, out, err = run(capsys, *words, *options)
        assert status == 2 and out == "" and text in err
