"""Which images are held out: decided by the images alone, in exact parts, and hardly changed by more images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.image_files import folder_of
from vitrail.data import open_source
from vitrail.data.pack import choose_settings, pack
from vitrail.data.settings import check_rule
from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.sources.files import FileSplit
from vitrail.data.split import divide, lowest_hashes
from vitrail.data.types import Source, Split, Subset, Task
from vitrail.errors import VitrailError


def files(targets: np.ndarray, task: Task = "classify", classes: tuple[str, ...] = (), names: list[str] | None = None) -> Split:
    names = names or [f"{k:05d}.jpg" for k in range(len(targets))]
    return FileSplit("train", task, Path("/nowhere"), names, targets, classes)


def held_out(split: Split, fraction: float) -> set[str]:
    return {split.image_name(int(k)) for k in lowest_hashes(split, fraction)}


def test_the_fraction_is_exact_in_every_class() -> None:
    targets = np.repeat(np.arange(4), [1, 2, 10, 200])
    chosen = lowest_hashes(files(targets, classes=tuple("abcd")), 0.1)
    assert np.bincount(targets[chosen], minlength=4).tolist() == [0, 1, 1, 20]


@pytest.mark.parametrize("count", [2, 3, 28, 101, 1000])
def test_a_regression_holds_out_the_fraction_over_the_whole_range(count: int) -> None:
    targets = np.random.default_rng(0).normal(size=(count, 1)).astype(np.float32)
    chosen = lowest_hashes(files(targets, "regress", ("age",)), 0.1)
    assert len(chosen) == max(1, round(count * 0.1))
    rank = targets[:, 0].argsort().argsort()[chosen]
    if count >= 28:
        assert rank.min() < count / 3 and rank.max() > count * 2 / 3


def test_a_part_to_train_on_has_every_class() -> None:
    targets = np.repeat(np.arange(4), [1, 2, 10, 200])
    source = Source(reference="made", kind="folder", splits={"train": files(targets, classes=tuple("abcd"))})
    parts = [divide(source, "train", holdout=0, holdout_rule="names", fraction=part)[0] for part in (0.1, 0.5)]
    assert [np.bincount(one.targets, minlength=4).tolist() for one in parts] == [[1, 1, 1, 20], [1, 1, 5, 100]]
    smaller, larger = ({one.image_name(k) for k in range(len(one))} for one in parts)
    assert smaller < larger


def test_label_sets_are_held_out_in_exact_proportion() -> None:
    targets = np.random.default_rng(0).integers(0, 2, (300, 6)).astype(np.float32)
    assert len(lowest_hashes(files(targets, "multilabel", tuple("abcdef")), 0.1)) == 30


def test_more_images_move_at_most_one_other_each() -> None:
    names = [f"{k:05d}.jpg" for k in range(500)]
    before = held_out(files(np.zeros(400, np.int64), classes=("a",), names=names[:400]), 0.1)
    for count in range(401, 500):
        after = held_out(files(np.zeros(count, np.int64), classes=("a",), names=names[:count]), 0.1)
        assert len(before - after) <= 1
        before = after


def test_the_split_depends_neither_on_order_nor_on_where_the_files_are(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"cat": 30, "dog": 20})
    val = open_source(f"folder:{tmp_path / 'photos'}").splits["val"]
    expected = sorted(f"photos/{val.image_name(k)}" for k in range(len(val)))
    rows = [f"{path.relative_to(tmp_path).as_posix()},{path.parent.name}" for path in sorted(tmp_path.glob("photos/*/*"))]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *reversed(rows)]))
    table = open_source(f"csv:{tmp_path / 'list.csv'}").splits["val"]
    assert sorted(table.image_name(k) for k in range(len(table))) == expected


def test_files_of_the_same_name_are_told_apart_by_their_folders() -> None:
    names = [f"cat/{k}/scan.png" for k in range(50)]
    one = held_out(files(np.zeros(50, np.int64), classes=("cat",), names=names), 0.2)
    two = held_out(files(np.zeros(50, np.int64), classes=("cat",), names=names[::-1]), 0.2)
    assert one == two and len(one) == 10 and one != {*names[:10]}


def test_images_without_files_have_a_split_too() -> None:
    images = ArraySplit("train", "classify", np.zeros((20, 2, 2, 1), np.uint8), np.arange(20) % 2, ("a", "b"))
    assert len(lowest_hashes(images, 0.1)) == 2


def divided(source: Source, rule: str = "names") -> tuple[Split, Split]:
    train, out = divide(source, "train", holdout=0.2, holdout_rule=rule, fraction=1.0)
    assert out is not None
    return train, out


def names_of(split: Split) -> set[str]:
    return {split.image_name(k) for k in range(len(split))}


def test_what_a_run_holds_out_hardly_changes_when_images_are_added(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos" / "train", {"cat": 30, "dog": 20})
    train, before = divided(open_source(f"folder:{tmp_path / 'photos'}"))
    assert np.bincount(before.targets).tolist() == [6, 4] and not names_of(train) & names_of(before)
    drawn = divided(open_source(f"folder:{tmp_path / 'photos'}"), "seed-0")[1]
    assert names_of(drawn) != names_of(before) and len(drawn) == len(before)
    folder_of(tmp_path / "photos" / "train", {"cat": 31, "dog": 20})
    after = divided(open_source(f"folder:{tmp_path / 'photos'}"))[1]
    assert len(names_of(before) - names_of(after)) <= 1


def test_a_packed_copy_holds_out_the_same_images_and_keeps_its_arrays(tmp_path: Path) -> None:
    source = open_source("digits")
    pack(source, tmp_path / "packed", choose_settings(source))
    packed = divided(open_source(f"packed:{tmp_path / 'packed'}"))
    for one, other in zip(packed, divided(source), strict=True):
        assert isinstance(one, Subset) and one.parent.arrays is not None and names_of(one) == names_of(other)


def test_a_rule_that_does_not_exist() -> None:
    with pytest.raises(VitrailError, match="it can be names, or seed-N"):
        check_rule("seed")
    with pytest.raises(VitrailError, match=r"data\.holdout_rule is 'seed-x'"):
        divided(open_source("digits"), "seed-x")
