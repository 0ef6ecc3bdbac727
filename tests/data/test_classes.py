from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.classes import align, check_range, natural_sort, split_name
from vitrail.data.sources.arrays import ArraySplit
from vitrail.data.types import Task
from vitrail.errors import VitrailError


def split_of(name: str, classes: tuple[str, ...], targets: list[int] | list[list[float]], task: Task = "classify") -> ArraySplit:
    kind = np.int64 if task == "classify" else np.float32
    return ArraySplit(name, task, np.zeros((len(targets), 2, 2, 3), np.uint8), np.array(targets, kind), classes)


def test_numbers_in_names_sort_as_numbers() -> None:
    assert natural_sort(["10", "2", "1"]) == ("1", "2", "10")
    assert natural_sort(["img12", "img2", "b", "a10", "a9"]) == ("a9", "a10", "b", "img2", "img12")
    assert natural_sort(["01", "1", "001"]) == ("001", "01", "1")
    assert natural_sort(["2" * 5000, "a", "1" * 5000]) == ("1" * 5000, "2" * 5000, "a")


@given(st.lists(st.text(max_size=8), unique=True))
def test_the_order_does_not_depend_on_where_names_came_from(names: list[str]) -> None:
    assert natural_sort(names) == natural_sort(reversed(names))


@given(st.lists(st.integers(0, 10**9), unique=True, min_size=1))
def test_integers_sort_by_value(numbers: list[int]) -> None:
    assert natural_sort(map(str, numbers)) == tuple(map(str, sorted(numbers)))


def test_every_split_uses_the_class_order_of_the_training_split() -> None:
    train = split_of("train", ("a", "b", "c"), [0, 1, 2])
    val = split_of("val", ("b", "c"), [0, 1, 1])  # by position it would be read as a, b, b
    aligned = align({"train": train, "val": val}, None)
    assert aligned["val"].targets.tolist() == [1, 2, 2]
    assert aligned["val"].classes == ("a", "b", "c")
    assert val.targets.tolist() == [0, 1, 1]  # what was given is not changed


def test_a_missing_class_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        align({"train": split_of("train", ("a", "b"), [0, 1]), "val": split_of("val", ("b",), [0])}, None)
    assert [record.getMessage() for record in caplog.records] == ["val has no image of 1 of 2 classes: a."]


def test_an_unknown_class_is_an_error_even_if_the_counts_agree() -> None:
    splits = {"val": split_of("val", ("b", "c", "d"), [0, 1, 2])}
    with pytest.raises(
        VitrailError, match=r"val has class 'd', which the model does not have \(a, b, c\).*--ignore-unknown-classes"
    ):
        align(dict(splits), ("a", "b", "c"))


def test_other_names_for_as_many_classes_may_be_in_the_same_order() -> None:
    splits = {"val": split_of("val", ("n1", "n2", "n3"), [0, 1, 2])}
    with pytest.raises(VitrailError, match="both have 3 classes: if their order is the same, evaluate with --match order"):
        align(dict(splits), ("a", "b", "c"))


def test_unknown_classes_can_be_skipped(caplog: pytest.LogCaptureFixture) -> None:
    val = split_of("val", ("b", "d"), [0, 1, 0, 1])
    aligned = align({"val": val}, ("a", "b"), ignore_unknown=True)["val"]
    assert aligned.targets.tolist() == [1, 1]
    assert [aligned.image_name(k) for k in range(2)] == ["000000", "000002"]
    assert "skipped 2 images of unknown classes (d)" in caplog.text


def test_a_class_without_images_is_not_unknown() -> None:
    aligned = align({"val": split_of("val", ("a", "z"), [0, 0])}, ("a",))
    assert aligned["val"].targets.tolist() == [0, 0]


def test_several_labels_are_mapped_by_name_too() -> None:
    val = split_of("val", ("b", "a"), [[1, 0], [1, 1]], "multilabel")
    aligned = align({"val": val}, ("a", "b", "c"))["val"]
    assert aligned.targets.tolist() == [[0, 1, 0], [1, 1, 0]]


def test_numeric_targets_must_match_the_model() -> None:
    split = split_of("val", ("height",), [[0.5]], "regress")
    assert align({"val": split}, ("height",))["val"].targets.tolist() == [[0.5]]
    with pytest.raises(VitrailError, match=r"val has the numeric targets height, but the model has weight"):
        align({"val": split}, ("weight",))


def test_duplicate_class_names_are_refused() -> None:
    with pytest.raises(VitrailError, match="'crane' is listed twice"):
        align({"train": split_of("train", ("crane", "crane"), [0, 1])}, None)


@pytest.mark.parametrize("label", [6, -1])
def test_a_label_outside_the_outputs_is_refused_before_the_device_sees_it(label: int) -> None:
    split = split_of("train", tuple("abcdef"), [0, 5, label])
    with pytest.raises(VitrailError, match=rf"000002 has label {label}, but there are 6 classes \(0 to 5\)\. 1 label is outside"):
        check_range(split)


def test_split_names() -> None:
    words = {"Train": "train", "training": "train", "valid": "val", "Validation": "val", "dev": "val", " test ": "test"}
    assert {word: split_name(word) for word in words} == words
    assert split_name("cat") is None
