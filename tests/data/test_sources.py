from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_files import encoded, folder_of, picture
from vitrail.data import embedded, open_source
from vitrail.data.types import BadImage, PackedStrings, Split, Subset
from vitrail.errors import VitrailError


def names(split: Split) -> list[str]:
    return [split.image_name(k) for k in range(len(split))]


def pairs(split: Split) -> dict[str, str]:
    return {split.image_name(k): split.classes[split.targets[k]] for k in range(len(split))}


def test_digits_always_have_the_same_split() -> None:
    source = open_source("digits")
    again = open_source("digits", rule="seed-7")
    train, val = source.splits["train"], source.splits["val"]
    assert (len(train) + len(val), source.classes) == (1797, tuple("0123456789"))
    assert train.arrays is not None
    assert train.arrays.shape[1:] == (8, 8, 1)
    assert train.arrays.max() == 255
    assert names(val) == names(again.splits["val"])
    assert not set(names(train)) & set(names(val))


def test_embedded_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    bunch, (images, targets) = datasets.load_digits(), embedded.digits()
    assert np.array_equal(images, bunch.images) and np.array_equal(targets, bunch.target)


def test_a_range_of_digits() -> None:
    whole, low, high = (open_source(reference) for reference in ("digits", "digits?classes=0-4", "digits?classes=5-9"))
    assert (low.classes, high.classes) == (tuple("01234"), tuple("56789"))
    for split in ("train", "val"):
        assert set(names(whole.splits[split])) == {*names(low.splits[split]), *names(high.splits[split])}
        assert pairs(high.splits[split]).items() <= pairs(whole.splits[split]).items()
    for wrong in ("4-0", "5", "0-x"):
        with pytest.raises(VitrailError, match="a range of digits such as 0-4"):
            open_source(f"digits?classes={wrong}")


def test_split_folders_with_numeric_class_names(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train/1": 2, "train/2": 2, "train/10": 2, "valid/2": 1, "valid/10": 1})
    source = open_source(str(tmp_path))
    assert source.kind == "folder"
    assert source.classes == ("1", "2", "10")
    assert list(source.splits) == ["train", "val"]
    assert pairs(source.splits["val"]) == {"valid/2/0.png": "2", "valid/10/0.png": "10"}
    assert source.splits["val"].targets.tolist() == [1, 2]
    assert "folder (split folders): train 6, val 2 images; 3 classes" in source.describe()


def test_nested_images_belong_to_the_first_folder(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train/cat/2019/may": 2, "train/dog": 1})
    (tmp_path / "train/cat/._0.png").write_bytes(b"macOS resource fork")
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    assert pairs(open_source(str(tmp_path)).splits["train"]) == {
        "train/cat/2019/may/0.png": "cat",
        "train/cat/2019/may/1.png": "cat",
        "train/dog/0.png": "dog",
    }


def test_class_folders_are_split_by_class_and_nothing_is_written(tmp_path: Path) -> None:
    folder_of(tmp_path, {"cat": 20, "dog": 40, "eel": 1})
    before = sorted(tmp_path.rglob("*"))
    first = open_source(f"folder:{tmp_path}")
    train, val = first.splits["train"], first.splits["val"]
    assert np.bincount(val.targets, minlength=3).tolist() == [2, 4, 0]
    assert not set(names(train)) & set(names(val))
    assert len(train) + len(val) == 61
    assert names(open_source(f"folder:{tmp_path}").splits["val"]) == names(val)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_split_file_of_an_older_version_is_used_for_its_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_of(tmp_path, {"cat": 10, "dog": 10})
    older = open_source(f"folder:{tmp_path}?val=0.2", rule="seed-1").splits
    rows = [f"{name},{part}" for part in ("train", "val") for name in names(older[part])]
    (tmp_path / "vitrail-split-seed1-val0.2.csv").write_text("\n".join(["path,split", *rows]))
    folder_of(tmp_path, {"cat": 12})
    after = open_source(f"folder:{tmp_path}?val=0.2", rule="seed-1").splits
    assert {name: names(split) for name, split in older.items()} == {name: names(split) for name, split in after.items()}
    assert "Skipped 2 images not listed in" in caplog.text
    assert sum(map(len, open_source(f"folder:{tmp_path}?val=0.2").splits.values())) == 22  # new runs do not read it
    (tmp_path / "dog/3.png").unlink()
    with pytest.raises(VitrailError, match=r"lists 1 image that cannot be found, for example dog/3.png"):
        open_source(f"folder:{tmp_path}?val=0.2", rule="seed-1")
    (tmp_path / "vitrail-split-seed1-val0.2.csv").write_text("file,part\ndog/3.png,val\n")
    with pytest.raises(VitrailError, match=r"cannot be read as a table of path and split \(it has no column 'path'\)"):
        open_source(f"folder:{tmp_path}?val=0.2", rule="seed-1")


def test_a_training_folder_alone_can_be_split(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train/a": 10, "train/b": 10})
    assert list(open_source(str(tmp_path)).splits) == ["train"]
    assert {name: len(split) for name, split in open_source(f"folder:{tmp_path}?val=0.3").splits.items()} == {
        "train": 14,
        "val": 6,
    }


def test_images_without_labels(tmp_path: Path) -> None:
    folder_of(tmp_path, {".": 2, "deep/er": 1})
    split = open_source(f"folder:{tmp_path}?labels=none").splits["train"]
    assert (split.task, split.targets.shape, len(split.classes)) == ("unlabelled", (3, 0), 0)
    assert names(split) == ["0.png", "1.png", "deep/er/0.png"]


MISTAKES = {
    "loose": ({".": 3}, r"contains 3 images but no class folders.*labels=none"),
    "loose in a split": ({"train": 3, "val": 1}, r"train/ contains 3 images but no class folders"),
    "nothing": ({"train/a": 0, "train/b": 0}, "train contains no images"),
    "too high": ({"data/a": 1, "data/b": 1}, r"Did you mean folder:.*data"),
    "turned": ({"a/train": 1, "a/val": 1, "b/train": 1}, "splits inside a class"),
    "two of a kind": ({"val/a": 1, "valid/a": 1, "train/a": 1}, "both mean 'val'"),
}


def test_a_folder_of_photos_that_are_not_read_says_so(tmp_path: Path) -> None:
    folder_of(tmp_path, {"cat": 0, "dog": 0})
    (tmp_path / "dog" / "IMG_1.HEIC").write_bytes(bytes(8))
    with pytest.raises(VitrailError, match=r"contains no images, only files such as .*IMG_1\.HEIC \(HEIC photos are not read;"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_layout_mistake_is_named(tmp_path: Path, mistake: str) -> None:
    counts, words = MISTAKES[mistake]
    folder_of(tmp_path, counts)
    with pytest.raises(VitrailError, match=f"(?s){words}") as caught:
        open_source(str(tmp_path))
    if mistake != "two of a kind":
        assert f"Found:\n  {tmp_path}/" in str(caught.value)
        assert "Accepted:\n  1. split folders" in str(caught.value)


def test_the_tree_shows_what_was_found(tmp_path: Path) -> None:
    folder_of(tmp_path, {f"deep/{k}": 1 for k in range(9)})
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(VitrailError) as caught:
        open_source(str(tmp_path))
    for line in ("    deep/\n      0/\n        0.png\n", "… 6 more folders", "readme.txt"):
        assert line in str(caught.value)


def test_an_empty_class_folder_is_a_class_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_of(tmp_path, {"train/a": 1, "train/b": 0, "train/c": 1, "val/c": 1})
    with caplog.at_level(logging.WARNING):
        source = open_source(str(tmp_path))
    assert source.classes == ("a", "b", "c")
    assert source.splits["val"].targets.tolist() == [2]
    assert "train has no image of 1 of 3 classes: b." in caplog.text


def test_the_classes_of_a_checkpoint_are_used(tmp_path: Path) -> None:
    folder_of(tmp_path, {"test/dog": 1, "test/cat": 1})
    source = open_source(str(tmp_path), classes=("dog", "fox", "cat"))
    assert pairs(source.splits["test"]) == {"test/cat/0.png": "cat", "test/dog/0.png": "dog"}
    assert sorted(source.splits["test"].targets.tolist()) == [0, 2]
    with pytest.raises(VitrailError, match="test has class 'cat', which the model does not have"):
        open_source(str(tmp_path), classes=("dog",))


def test_links_are_followed_and_broken_ones_named(tmp_path: Path) -> None:
    real = folder_of(tmp_path / "real", {"a": 2, "b": 1})
    linked = tmp_path / "linked"
    (linked / "train").mkdir(parents=True)
    (linked / "train/a").symlink_to(real / "a", target_is_directory=True)
    (linked / "train/b").mkdir()
    (linked / "train/b/0.png").symlink_to(real / "b/0.png")
    (linked / "train/b/gone.png").symlink_to(real / "b/nothing.png")
    (linked / "train/b/round.png").symlink_to(linked / "train/b/round.png")
    (real / "a/up").symlink_to(real, target_is_directory=True)  # a circle of folders
    split = open_source(str(linked)).splits["train"]
    found = names(split)
    assert found[:2] == ["train/a/0.png", "train/a/1.png"]
    assert len(found) == len(set(found)) < 12
    assert split.payload(0) == (real / "a/0.png").read_bytes()
    with pytest.raises(BadImage, match=r"gone.png: a broken link to .*nothing.png"):
        split.payload(found.index("train/b/gone.png"))
    with pytest.raises(BadImage, match=r"round\.png: a circular link"):
        split.payload(found.index("train/b/round.png"))


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("fodler:x", "there is no source kind 'fodler'. Did you mean folder"),
        ("folder:nowhere", "does not exist; a folder of images is expected"),
        ("nowhere", "neither an existing path nor a source"),
        ("digit", "Did you mean digits"),
        ("digits?seed=3", "digits: has no option 'seed'"),
        ("csv:nowhere.csv", "Cannot read the table nowhere.csv"),
        ("packed:nowhere", "is not a packed dataset: it has no packed.json"),
        ("", "The data source '' has no path or name"),
        ("folder:?val=0.1", r"The data source 'folder:\?val=0.1' has no path or name"),
    ],
)
def test_a_mistyped_source_gets_a_suggestion(reference: str, words: str) -> None:
    with pytest.raises(VitrailError, match=words):
        open_source(reference)


def test_mistyped_options_get_a_suggestion(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a": 2, "b": 2})
    for tail, words in {
        "vla=0.1": "folder: has no option 'vla'. Did you mean val",
        "val=2": "val=2 in folder:.*: a fraction from 0",
        "val=x": "val=x in folder:.*: a fraction from 0",
        "labels=some": "write labels=none",
    }.items():
        with pytest.raises(VitrailError, match=words):
            open_source(f"folder:{tmp_path}?{tail}")
    other = tmp_path / "a.txt"
    other.write_text("x")
    with pytest.raises(VitrailError, match="is not a table"):
        open_source(str(other))


def test_paths_may_have_a_trailing_blank_or_a_question_mark(tmp_path: Path) -> None:
    odd = folder_of(tmp_path / "who?=me", {"train/a": 1, "train/b": 1})
    assert len(open_source(f"{odd} ").splits["train"]) == 2


def test_splits_can_be_pickled(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train/ä ö": 3, "train/日本": 2})
    split = open_source(str(tmp_path)).splits["train"]
    part = split.subset([4, 0]).subset([1])
    for each in (split, part):
        again = pickle.loads(pickle.dumps(each))
        assert names(again) == names(each)
        assert again.payload(0) == each.payload(0)
    assert isinstance(part, Subset)
    assert part.parent is split
    assert names(part) == [names(split)[0]]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train/a": 1, "train/b": 1})
    odd = os.fsencode(tmp_path / "train/a") + b"/\xff.png"
    Path(os.fsdecode(odd)).write_bytes(encoded(picture(0)))
    split = open_source(str(tmp_path)).splits["train"]
    assert len(split.payload(1)) == len(encoded(picture(0)))


def test_packed_strings_are_a_list_of_strings() -> None:
    words = ["", "a", "ünï", "", "z" * 50]
    table = PackedStrings(words)
    assert [table[k] for k in range(len(table))] == words
    assert table[-1] == words[-1]
    assert len(PackedStrings([])) == 0
