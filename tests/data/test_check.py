from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from scipy.fft import dctn

from tests.data.image_files import encoded, folder_of, picture
from vitrail.data import open_source
from vitrail.data.check import Report, check
from vitrail.data.contact_sheet import contact_sheet
from vitrail.data.duplicates import MAX_BITS, exact_pairs, fingerprints, near_pairs
from vitrail.data.find_bad import find_bad
from vitrail.data.pack import choose_settings
from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.types import BadImage, Source


def kinds(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems]


def items(report: Report, kind: str) -> tuple[str, ...]:
    return next(problem.items for problem in report.problems if problem.kind == kind)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "set", {"train/a": 6, "train/b": 4, "val/a": 2, "val/b": 2})


def test_a_good_dataset_has_counts_and_no_problems(good: Path) -> None:
    done: list[int] = []
    report = check(open_source(str(good)), progress=done.append)
    assert report.problems == []
    assert report.notes == []
    assert report.splits["train"].per_class == {"a": 6, "b": 4}
    assert report.splits["val"].sizes == {(40, 48): 4}
    assert report.splits["val"].modes == {"RGB": 4}
    assert sum(done) == 14
    assert json.loads(json.dumps(report.to_dict()))["splits"]["train"]["sizes"] == {"40x48": 10}


def test_every_corrupted_file_is_listed_and_none_stops_the_check(good: Path) -> None:
    corrupted = {
        "empty.jpg": b"",
        "text.jpg": b"this is a note and not a photograph\n" * 9,
        "cut.jpg": encoded(picture(1, 300, 300), "JPEG")[:3000],
        "cut.png": encoded(picture(2, 300, 300))[:9000],
        "bomb.png": encoded(Image.new("1", (20_000, 10_000))),
    }
    for name, content in corrupted.items():
        (good / "train/a" / name).write_bytes(content)
    (good / "train/a/link.png").symlink_to("nowhere.png")
    report = check(open_source(str(good)))
    assert kinds(report) == ["unreadable"]
    listed = "\n".join(items(report, "unreadable"))
    for words in (
        "empty.jpg: an empty file",
        "text.jpg: a text file",
        "cut.jpg: truncated",
        "cut.png: ",
        "bomb.png: more than 178,956,970 pixels: a decompression bomb",
        "link.png: a broken link",
    ):
        assert words in listed
    assert len(items(report, "unreadable")) == 6
    assert "6 of 16 images cannot be used" in report.problems[0].message


def test_the_same_file_in_two_splits(good: Path) -> None:
    (good / "val/a/copy.png").write_bytes((good / "train/a/3.png").read_bytes())
    (good / "val/b/mislabelled.png").write_bytes((good / "train/a/4.png").read_bytes())
    report = check(open_source(str(good)))
    assert kinds(report) == ["duplicates"]
    assert items(report, "duplicates") == ("train/a/3.png ~ val/a/copy.png", "train/a/4.png ~ val/b/mislabelled.png")
    assert report.problems[0].message == "2 images of val are also in train; 1 of 2 pairs with different labels."


def test_the_same_image_saved_again_in_two_splits(good: Path) -> None:
    image = Image.open(good / "train/a/3.png")
    (good / "val/a/jpeg.jpg").write_bytes(encoded(image, "JPEG", quality=60))
    (good / "val/a/small.png").write_bytes(encoded(image.resize((96, 80))))
    (good / "val/a/bright.png").write_bytes(encoded(ImageEnhance.Brightness(image).enhance(0.9)))
    report = check(open_source(str(good)))
    assert kinds(report) == ["near-duplicates"]
    assert {item.split(" ~ ")[0] for item in items(report, "near-duplicates")} == {"train/a/3.png"}
    assert len(items(report, "near-duplicates")) == 3
    assert check(open_source(str(good)), duplicates="exact").problems == []


def test_duplicates_within_a_split_are_a_note_unless_labels_differ(good: Path) -> None:
    (good / "train/a/again.png").write_bytes((good / "train/a/3.png").read_bytes())
    report = check(open_source(str(good)))
    assert report.problems == []
    assert "train: 2 identical images in 1 group" in report.notes[0]
    (good / "train/b/again.png").write_bytes((good / "train/a/3.png").read_bytes())
    assert kinds(check(open_source(str(good)))) == ["conflicting-labels"]
    assert check(open_source(str(good)), duplicates="none").problems == []


def test_empty_classes_and_a_single_class(good: Path) -> None:
    (good / "train/c").mkdir()
    report = check(open_source(str(good)))
    assert kinds(report) == ["empty-class"]
    assert items(report, "empty-class") == ("c",)
    assert report.notes == ["val has no image of 1 of 3 classes: c."]
    only = folder_of(good.parent / "only", {"train/a": 2})
    assert kinds(check(open_source(str(only)))) == ["one-class"]


def test_imbalance_mixed_modes_and_rotation_are_noted(good: Path) -> None:
    grey = Image.fromarray(picture(1)).convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6
    (good / "train/a/grey.png").write_bytes(encoded(grey, exif=exif))
    folder_of(good, {"train/a": 60})
    notes = check(open_source(str(good))).notes
    assert notes == [
        "train: the largest class has 61 images, the smallest 4.",
        "train: images have different modes: RGB 64, L 1.",
        "train: 1 image rotated by EXIF orientation.",
    ]


def test_missing_files_of_a_table_are_problems(tmp_path: Path) -> None:
    folder_of(tmp_path, {"x": 2})
    (tmp_path / "t.csv").write_text("path,label\nx/0.png,a\nx/1.png,b\nx/2.png,b\n")
    report = check(open_source(f"csv:{tmp_path}/t.csv?val=0", bad_images="skip"))
    assert kinds(report) == ["missing"]
    assert "x/2.png: no such file (line 4" in items(report, "missing")[0]


def test_many_channels_and_names_that_are_not_utf8(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "set/train" / label).mkdir(parents=True)
        for k in range(3):
            bands = np.random.default_rng([ord(label), k]).integers(0, 65536, (20, 20, 13), dtype=np.uint16)
            np.save(tmp_path / "set/train" / label / f"{k}.npy", bands)
    odd = Path(os.fsdecode(os.fsencode(tmp_path / "set/train/a") + b"/\xff.npy"))
    odd.write_bytes(b"")
    report = check(open_source(f"folder:{tmp_path}/set?val=0.4"))
    assert kinds(report) == ["unreadable"]
    assert report.splits["train"].modes == {"13 channels, 16 bits": 4}
    contact_sheet(open_source(f"folder:{tmp_path}/set?val=0.4"), tmp_path / "sheet.png")
    assert choose_settings(open_source(f"folder:{tmp_path}/set"), bits=16).channels == 13


def test_digits_have_no_problems() -> None:
    assert check(open_source("digits")).problems == []


def test_the_hash_is_the_sign_of_low_dct_frequencies() -> None:
    thumbnails = np.random.default_rng(0).integers(0, 256, (20, 32, 32), dtype=np.uint8)
    waves = dctn(thumbnails.astype(np.float64), axes=(1, 2))[:, :8, :8].reshape(20, 64)
    waves[:, 0] = 0
    bits = waves > np.median(waves[:, 1:], axis=1, keepdims=True)
    # scipy's unnormalised transform scales all frequencies alike, so the signs about the median are the same.
    assert np.array_equal(np.unpackbits(fingerprints(thumbnails)[0].view(np.uint8).reshape(-1, 8), axis=1), bits)


def test_no_pair_within_seven_bits_is_missed() -> None:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 2**63, 3000, dtype=np.uint64)
    second = first[:400].copy()
    for row in range(400):
        for bit in rng.permutation(64)[: row % 12]:
            second[row] ^= np.uint64(1) << np.uint64(bit)
    # Equal thumbnails, so that only the hashes decide.
    same = np.broadcast_to(np.eye(16, dtype=np.uint8).reshape(-1) * 200, (3000, 256))
    found = {(int(a), int(b)) for a, b in near_pairs((first, same), (second, same[:400]))}
    xor = first[:, None] ^ second[None]
    distance = np.unpackbits(xor.view(np.uint8).reshape(3000, 400, 8), axis=2).sum(2)
    assert found == {(int(a), int(b)) for a, b in np.argwhere(distance <= MAX_BITS)}
    assert len(found) >= 250


def test_equal_digests_are_paired() -> None:
    first, second = np.array([b"c", b"a", b"b"]), np.array([b"b", b"x", b"c", b"b"])
    assert sorted(map(tuple, exact_pairs(first, second).tolist())) == [(0, 2), (2, 0), (2, 3)]
    assert exact_pairs(first[:0], second).shape == (0, 2)
    assert exact_pairs(first, second[:0]).shape == (0, 2)


def test_different_images_are_not_reported_as_duplicates() -> None:
    images = np.stack([picture(k, 32, 32, 1)[:, :, 0] for k in range(400)])
    hashes, small = fingerprints(images)
    assert len(near_pairs((hashes[:200], small[:200]), (hashes[200:], small[200:]))) == 0
    assert len(near_pairs((hashes, small), (hashes, small))) == 400


def test_the_contact_sheet_shows_every_class_and_marks_unreadable_images(good: Path) -> None:
    (good / "val/b/0.png").write_bytes(b"")
    file = good.parent / "sheet.png"
    contact_sheet(open_source(str(good)), file)
    with Image.open(file) as sheet:
        assert sheet.format == "PNG"
        pixels = np.asarray(sheet.convert("RGB")).astype(int)
    red = (np.abs(pixels - (190, 40, 40)).max(2) < 3).sum()
    assert red > 300  # the frame around the unreadable one
    first = np.asarray(Image.open(good / "train/a/0.png").resize((96, 80), Image.Resampling.BICUBIC)).astype(int)
    rows = pixels[64 + 8 : 64 + 88, 190 : 190 + 96]
    assert np.abs(rows - first).mean() < 1  # all six of train/a are shown, in order


@pytest.mark.parametrize("task", ["regress", "unlabelled", "multilabel"])
def test_datasets_of_other_tasks_are_checked_and_drawn(tmp_path: Path, task: str) -> None:
    images = np.stack([picture(k, 32, 32, 1) for k in range(12)])
    targets = {"regress": np.ones((12, 1)), "unlabelled": np.ones((12, 0)), "multilabel": np.eye(12)[:, :3]}[task]
    classes = {"regress": ("age",), "unlabelled": (), "multilabel": ("a", "b", "c")}[task]
    split = ArraySplit("train", task, images, targets.astype(np.float32), classes)  # type: ignore[arg-type]
    source = Source(reference="x", kind="folder", splits={"train": split})
    assert check(source).problems == []
    contact_sheet(source, tmp_path / "sheet.png")
    assert Image.open(io.BytesIO((tmp_path / "sheet.png").read_bytes())).size[0] > 600


def test_classes_that_differ_by_case_or_normalisation_only(tmp_path: Path) -> None:
    root = folder_of(
        tmp_path / "set", {"train/Cat": 2, "train/cat": 2, "train/caf\u00e9": 2, "train/cafe\u0301": 2, "train/dog": 2}
    )
    report = check(open_source(f"{root}?val=0"))
    assert kinds(report) == ["similar-classes"] and "2 groups of classes" in report.problems[0].message
    assert "Cat ~ cat" in items(report, "similar-classes")
    assert any("'caf\\xe9'" in item and "'cafe\\u0301'" in item for item in items(report, "similar-classes"))


def test_images_of_one_class_only(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "set", {"train/a": 3, "val/a": 1})
    (root / "train/b").mkdir()
    report = check(open_source(str(root)))
    assert kinds(report) == ["empty-class", "one-class"] and "only one class, 'a'" in report.problems[1].message


def test_images_with_a_side_of_one_pixel(good: Path) -> None:
    Image.new("RGB", (1, 1)).save(good / "train/a/dot.png")
    Image.new("RGB", (90, 1)).save(good / "val/b/line.png")
    report = check(open_source(str(good)))
    tiny = [problem.items for problem in report.problems if problem.kind == "tiny"]
    assert tiny == [("train/a/dot.png: 1×1 pixels",), ("val/b/line.png: 1×90 pixels",)]


def test_files_that_are_not_images(good: Path) -> None:
    for name in ("train/a/photo.heic", "train/b/deep/notes.txt", "train/a/Thumbs.db", "train/a/.DS_Store", "README.md"):
        (good / name).parent.mkdir(exist_ok=True)
        (good / name).write_text("x")
    report = check(open_source(str(good)))
    assert kinds(report) == ["stray-files"]
    assert items(report, "stray-files") == ("train/a/photo.heic", "train/b/deep/notes.txt")


def test_bad_images_are_found_within_a_time(good: Path) -> None:
    (good / "train/a/cut.jpg").write_bytes(encoded(picture(1, 300, 300), "JPEG")[:3000])
    (good / "train/b/text.png").write_text("not a photograph at all")
    split = open_source(str(good)).split("train")
    done: list[int] = []
    bad, looked_at = find_bad(split, workers=2, progress=done.append)
    assert looked_at == len(split) == sum(done) == 12
    assert [one.name for one in bad] == ["train/a/cut.jpg", "train/b/text.png"] and "truncated" in bad[0].reason
    assert find_bad(split, workers=1, seconds=0) == ([], 0)


def test_kinds_are_told_apart_by_a_field_and_not_by_words(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a": 2, "b": 2})
    source = open_source(f"folder:{tmp_path}?val=0")
    skipped = (BadImage("x", "a folder, not a regular file", kind="missing"), BadImage("y", "whatever", kind="special-file"))
    report = check(dataclasses.replace(source, skipped=tuple(pickle.loads(pickle.dumps(skipped)))))
    assert items(report, "missing") == ("x: a folder, not a regular file",)
    assert items(report, "special-file") == ("y: whatever",)
