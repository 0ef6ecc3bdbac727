"""What a model was trained on is recorded, and found again among the images that it is evaluated on."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.image_files import encoded, folder_of, picture
from vitrail.data import open_source
from vitrail.data.pack import choose_settings, pack
from vitrail.data.sources.files import FileSplit
from vitrail.data.split import divide
from vitrail.data.trained_on import (
    Overlap,
    TrainedOn,
    evaluation_split,
    location_of,
    names_digest,
    open_for,
    overlap,
    record,
    record_split,
    records_in,
)
from vitrail.errors import VitrailError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder_of(tmp_path / "photos", {"cat": 20, "dog": 20})
    return tmp_path / "photos"


def trained(reference: str, rule: str = "names", **chosen: Any) -> TrainedOn:
    source = open_source(reference, rule=rule)
    known = TrainedOn(source=reference, images=0, **chosen)
    return record(source, known.divide(source)[0], train="train", **chosen)


def compare(known: TrainedOn, reference: str, split: str | None = None) -> Overlap:
    source = open_for([known], reference)
    found = overlap([known], source, evaluation_split([known], source, split))
    assert found is not None
    return found


def test_the_own_hold_out_was_not_trained_on(photos: Path) -> None:
    known = trained(f"folder:{photos}")
    assert compare(known, f"folder:{photos}") == Overlap(0, True)
    assert compare(known, str(photos)) == Overlap(0, True)
    found = compare(known, f"folder:{photos}", "train")
    assert found.images == 36 and found.exact
    assert found.notes[0].startswith("trained on: all of these 36 images were among the training images of this model")


def test_another_name_of_the_same_folder(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = trained(f"folder:{photos}")
    (photos.parent / "link").symlink_to(photos)
    monkeypatch.chdir(photos.parent)
    for reference in ("photos", "folder:link", "folder:./photos/../photos"):
        assert compare(known, reference) == Overlap(0, True)
        assert compare(known, reference, "train").images == 36


def test_another_fraction_of_the_same_folder(photos: Path) -> None:
    known = trained(f"folder:{photos}")
    found = compare(known, f"folder:{photos}?val=0.5")
    assert (found.images, found.exact) == (16, True)  # the tenth that was held out is part of the half
    assert "16 of these 20 images" in found.notes[0]
    assert compare(known, f"folder:{photos}?val=0").images == 36


def test_a_table_of_the_same_files(photos: Path) -> None:
    known, val = trained(f"folder:{photos}"), open_source(f"folder:{photos}").splits["val"]
    held_out = [val.image_name(k) for k in range(len(val))]
    for names, expected in (
        (held_out, 0),
        (["cat/0.png", "dog/0.png", *held_out], 2 - len({"cat/0.png", "dog/0.png"} & {*held_out})),
    ):
        rows = [f"{photos / name},{name[:3]},test" for name in dict.fromkeys(names)]
        (photos.parent / "table.csv").write_text("\n".join(["path,label,split", *rows]))
        assert compare(known, f"csv:{photos.parent / 'table.csv'}").images == expected


def test_a_copy_elsewhere_is_found_by_content(photos: Path) -> None:
    known = trained(f"folder:{photos}")
    copy = photos.parent / "copy"
    shutil.copytree(photos, copy / "train")
    found = compare(known, f"folder:{copy}")
    assert (found.images, found.exact) == (36, False)  # all that were recorded, of which there are up to 64
    assert "36 of 36 training images that were looked for" in found.notes[0]
    for k in range(20):
        for name in ("cat", "dog"):  # other images under the same names
            (copy / "train" / name / f"{k}.png").write_bytes(encoded(picture(1000 + k)))
    assert compare(known, f"folder:{copy}") == Overlap(0, False)


def test_a_changed_folder_is_noticed(photos: Path) -> None:
    known = trained(f"folder:{photos}")
    folder_of(photos, {"cat": 60})
    notes = compare(known, f"folder:{photos}").notes
    assert any("has changed since training, which had 36 images of it" in note for note in notes)


def test_what_the_run_held_out_itself_is_a_split(photos: Path) -> None:
    folder_of(photos.parent / "whole", {"train/cat": 20, "train/dog": 20})
    reference = f"folder:{photos.parent / 'whole'}"
    known = trained(reference, holdout=0.25, holdout_rule="seed-3", fraction=0.5)
    source = open_for([known], reference)
    assert evaluation_split([known], source, None).name == "holdout" and len(source.splits["holdout"]) == 10
    assert compare(known, reference) == Overlap(0, True)
    assert compare(known, reference, "train").images == known.images == 16
    older = known.to_dict()
    assert older.pop("holdout_rule") == "seed-3"
    assert TrainedOn.from_dict({**older, "holdout_seed": 3}) == known  # as the version before wrote it


def test_older_runs_are_divided_by_their_seed(photos: Path) -> None:
    run = photos.parent / "run"
    run.mkdir()
    recipe = {"seed": 5, "data": {"source": f"folder:{photos}", "train": "train", "holdout": 0.0, "fraction": 1.0}}
    (run / "config.json").write_text(json.dumps({"format": 2, "recipe": recipe, "resolved": {"images": 36}}))
    (known,) = records_in({}, str(run / "model"))
    assert (known.rule, known.images) == ("seed-5", 36) and records_in({}, str(run)) == (known,)
    older = open_source(f"folder:{photos}", rule="seed-5").splits["val"]
    found = evaluation_split([known], open_for([known], f"folder:{photos}"), None)
    assert [found.image_name(k) for k in range(4)] == [older.image_name(k) for k in range(4)]
    assert [found.image_name(k) for k in range(4)] != [open_source(str(photos)).splits["val"].image_name(k) for k in range(4)]
    assert compare(known, f"folder:{photos}") == Overlap(0, True)
    assert records_in({"trained_on": []}, str(run)) == () and records_in({}, str(photos)) == ()


def test_a_record_is_small_and_survives_json(photos: Path) -> None:
    known = trained(f"folder:{photos}")
    text = json.dumps(known.to_dict())
    assert TrainedOn.from_dict(json.loads(text)) == known
    many = FileSplit("train", "classify", photos, [f"{k}.png" for k in range(3000)], np.zeros(3000, np.int64), ("a",))
    assert names_digest(many) == names_digest(many.subset(np.arange(3000))) != names_digest(many.subset(np.arange(1, 3000)))


def test_what_the_start_was_trained_on_counts_too(tmp_path: Path) -> None:
    """A base trained on all images, fine-tuned with a hold-out: the held-out images were seen by the base."""
    folder_of(tmp_path / "photos" / "train", {"cat": 50, "dog": 50})
    reference = f"folder:{tmp_path / 'photos'}"
    base, own = trained(reference), trained(reference, holdout=0.1)
    source = open_for([own, base], reference)
    split = evaluation_split([own, base], source, None)
    assert split.name == "holdout" and len(split) == 10
    found = overlap([own, base], source, split)
    assert found is not None and (found.images, found.exact) == (10, True) and "all of these 10 images" in found.notes[0]
    assert overlap([own], source, split) == Overlap(0, True)


def test_several_trainings_may_have_had_different_images(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos" / "train", {"cat": 50, "dog": 50})
    reference = f"folder:{tmp_path / 'photos'}"
    own, everything = trained(reference, holdout=0.1), open_source(reference)
    once, twice = (overlap(records, everything, everything.splits["train"]) for records in ([own], [own, own]))
    assert once is not None and (once.images, once.exact) == (90, True)
    assert twice is not None and (twice.images, twice.exact) == (90, False)


def test_nothing_is_known_without_a_record(photos: Path) -> None:
    source = open_source(str(photos))
    assert overlap([], source, source.splits["val"]) is None


def test_a_source_divided_by_another_rule_has_not_changed(photos: Path) -> None:
    known = trained(f"folder:{photos}", rule="seed-1")
    source = open_source(f"folder:{photos}")
    split = source.splits["val"]
    older = {split.image_name(k) for split in [open_source(str(photos), rule="seed-1").splits["train"]] for k in range(len(split))}
    expected = sum(split.image_name(k) in older for k in range(len(split)))
    found = overlap([known], source, split)
    assert found is not None and expected > 0 and (found.images, found.exact) == (expected, True)
    assert not any("changed" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["digits", "packed", "links"])
def test_images_held_out_of_a_split_that_was_trained_on_are_found(kind: str, tmp_path: Path) -> None:
    """Where a source has splits of its own, too: another run may have held out fewer of them."""
    reference = "digits"
    if kind != "digits":
        root = folder_of(tmp_path / "files", {"train/cat": 20, "train/dog": 20, "val/cat": 2, "val/dog": 2})
        reference = f"folder:{root}"
    if kind == "packed":
        source = open_source(reference)
        pack(source, tmp_path / "packed", choose_settings(source), workers=1)
        reference = f"packed:{tmp_path / 'packed'}"
    if kind == "links":
        for file in sorted(root.rglob("*.png")):
            link = tmp_path / "links" / file.relative_to(root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
        reference = f"folder:{tmp_path / 'links'}"
    source = open_source(reference)
    few, many = (divide(source, "train", holdout=part, holdout_rule="names", fraction=1.0) for part in (0.1, 0.5))
    known = record(source, few[0], train="train", holdout=0.1)
    assert few[1] is not None and many[1] is not None
    names = {few[0].image_name(k) for k in range(len(few[0]))}
    expected = sum(many[1].image_name(k) in names for k in range(len(many[1])))
    assert expected > 0 and overlap([known], open_source(reference), few[1]) == Overlap(0, True)
    found = overlap([known], source, many[1])
    assert found is not None and (found.images, found.exact) == (expected, True)


def test_the_same_file_name_in_two_splits_is_not_the_same_image(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"train/cat": 3, "train/dog": 3, "val/cat": 3, "val/dog": 3})
    reference = f"folder:{tmp_path / 'photos'}"
    assert compare(trained(reference), reference) == Overlap(0, True)


@pytest.mark.parametrize("kind", ["link", "copy"])
def test_a_training_image_that_is_also_in_the_validation_folder_is_found(kind: str, tmp_path: Path) -> None:
    photos = folder_of(tmp_path / "photos", {"train/cat": 6, "train/dog": 6, "val/cat": 3, "val/dog": 3})
    source, target = photos / "train" / "cat" / "1.png", photos / "val" / "cat" / "again.png"
    target.symlink_to(source) if kind == "link" else shutil.copy(source, target)
    found = compare(trained(f"folder:{photos}"), f"folder:{photos}")
    assert found.images == 1 and found.notes[0].startswith("trained on: 1 of ")


def test_a_file_in_two_splits_of_a_table_is_found_and_said(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f"photos/cat/{k}.png,cat,{split}" for split, numbers in (("train", range(10)), ("val", range(7, 14))) for k in numbers]
    table = photos.parent / "table.csv"
    table.write_text("\n".join(["path,label,split", *rows, "./photos/cat/0.png,cat,test"]))
    found = compare(trained(f"csv:{table}"), f"csv:{table}")
    assert (found.images, found.exact) == (3, True)
    assert compare(trained(f"csv:{table}"), f"csv:{table}", "test").images == 1
    assert "4 files are in more than one split, for example photos/cat/7.png in train and val" in caplog.text


def test_the_split_of_the_runs_validation_is_the_default(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        folder_of(tmp_path / "photos" / part, {"cat": 10, "dog": 10})
    reference = f"folder:{tmp_path / 'photos'}"
    for chosen, expected in (({}, "val"), ({"validation": "test"}, "test"), ({"validation": "holdout", "holdout": 0.2}, "holdout")):
        known = trained(reference, **chosen)
        assert evaluation_split([known], open_for([known], reference), None).name == expected
    assert evaluation_split([], open_source(reference), None).name == "val"


def test_a_hub_dataset_is_no_folder_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = location_of("hf:beans")
    (tmp_path / "beans").mkdir()
    assert before is not None and location_of("hf:beans") == before


def test_images_opened_in_python_are_recorded_by_their_content(photos: Path) -> None:
    split = open_source(str(photos)).splits["train"]
    known = record_split("my images", split)
    source = open_source(str(photos))
    found = overlap([known], source, source.splits["train"])
    assert found is not None and found.images == 36 and not found.exact


@pytest.mark.parametrize("change", [{"images": "36"}, {"sample": "xyz"}, {"fraction": None}, {"source": 3}])
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(VitrailError, match="record of what this checkpoint was trained on is corrupted"):
        records_in({"trained_on": [{"source": "digits", "images": 36, **change}]}, "run")
    with pytest.raises(VitrailError, match="corrupted"):
        records_in({"trained_on": [5]}, "run")


@pytest.mark.parametrize("store", ["arrays", "encoded"])
def test_a_packed_copy_is_compared_by_names(store: str, photos: Path, tmp_path: Path) -> None:
    known = trained(f"folder:{photos}")
    source = open_source(f"folder:{photos}?val=0.5")
    pack(source, tmp_path / "packed", choose_settings(source, store=store), workers=1)  # type: ignore[arg-type]
    found = compare(known, f"packed:{tmp_path / 'packed'}")
    assert (found.images, found.exact) == (16, True)
    shutil.rmtree(photos)  # then only the recorded names are left
    found = compare(known, f"packed:{tmp_path / 'packed'}", "train")
    assert found.images == 20 and not found.exact and "with the same name" in found.notes[0]


def test_a_copy_with_other_names_and_classes_is_found_by_content(photos: Path, tmp_path: Path) -> None:
    known = trained(f"folder:{photos}")
    for number, file in enumerate(sorted(photos.rglob("*.png")) or sorted(photos.rglob("*.jpg"))):
        target = tmp_path / "copy" / ("n01" if "cat" in file.parts else "n02") / f"x{number}{file.suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    found = compare(known, f"folder:{tmp_path / 'copy'}?val=0", "train")
    assert found.images == 36 and not found.exact and "with the same content" in found.notes[0]
    older = dataclasses.replace(known, sample=" ".join(word[:32] for word in known.sample.split()))
    assert compare(older, f"folder:{tmp_path / 'copy'}?val=0", "train").images == 0  # it can only be searched by names


def test_equal_file_names_in_folders_of_subjects(tmp_path: Path) -> None:
    """s000/image.png, s001/image.png, …: a copy is found, and a table of absolute paths holds out the same images."""
    for label in ("c0", "c1"):
        for number in range(20):
            file = tmp_path / "photos" / label / f"s{number:03d}" / "image.png"
            file.parent.mkdir(parents=True)
            file.write_bytes(encoded(picture(number + 100 * (label == "c1"), 12, 12), "PNG"))
    known = trained(f"folder:{tmp_path / 'photos'}")
    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    assert compare(known, f"folder:{tmp_path / 'copy'}", "train").images == 36
    rows = [f"{file},{file.parts[-3]}" for file in sorted((tmp_path / "photos").rglob("*.png"))]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    held_out = [
        {Path(split.image_name(k)).parts[-3:] for k in range(len(split))}
        for split in (open_source(one).splits["val"] for one in (f"csv:{tmp_path / 'table.csv'}", f"folder:{tmp_path / 'photos'}"))
    ]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 4


def test_a_hostile_record_is_refused_at_once() -> None:
    """A pattern with nested repetitions took hours for such a text."""
    began = time.monotonic()
    with pytest.raises(VitrailError, match="corrupted"):
        TrainedOn.from_dict({"source": "x", "images": 1, "sample": "a" * 96 * 40 + "x"})
    for change in ({"fraction": float("nan")}, {"holdout": 2.0}):
        with pytest.raises(VitrailError, match="corrupted"):
            TrainedOn.from_dict({"source": "x", "images": 1, **change})
    assert time.monotonic() - began < 5
