"""Suggestions for mistyped names."""

from __future__ import annotations

import errno

import pytest

from vitrail.errors import did_you_mean, reason_of

KNOWN = ["train", "finetune", "predict", "inspect", "digits", "tiny-imagenet", "tiny-imagenet-short", "kitti_distance"]


@pytest.mark.parametrize(
    ("word", "suggested"),
    [
        ("trian", " Did you mean train?"),
        ("Digit", " Did you mean digits?"),
        ("kitti", " Did you mean kitti_distance?"),
        ("tiny-imagnet", " Did you mean tiny-imagenet?"),
        ("tiny", " Did you mean tiny-imagenet or tiny-imagenet-short?"),
        ("strange", ""),  # shares letters with train
        ("perfect", ""),
        ("x", ""),
    ],
)
def test_only_what_is_really_near_is_suggested(word: str, suggested: str) -> None:
    assert did_you_mean(word, KNOWN) == suggested


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("recipe"), "it has no 'recipe'"),
        (KeyError(b"vitrail"), "it has no vitrail"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.json"), "No such file or directory"),
        (OSError("vague"), "vague"),
        (ValueError("not a number"), "not a number"),
    ],
)
def test_why_something_failed(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
