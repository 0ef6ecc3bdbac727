"""The included photos: read by name from anywhere, as files and commands are, and classified as their names say."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

import vitrail
from vitrail.data import open_source
from vitrail.data.embedded import PHOTOS
from vitrail.errors import VitrailError


@pytest.mark.parametrize("name", PHOTOS)
def test_a_photo_is_a_source_without_labels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    split = open_source(f"example:{name}").splits["test"]
    assert (len(split), split.task, split.image_name(0)) == (1, "unlabelled", f"example:{name}")
    payload = split.payload(0)
    assert isinstance(payload, bytes) and len(payload) < 50_000
    with Image.open(io.BytesIO(payload)) as photo:
        assert photo.mode == "RGB" and min(photo.size) >= 300 and "icc_profile" not in photo.info


def test_the_included_model_knows_them() -> None:
    found = vitrail.load("vitrail-ti8-tiny-imagenet").predict(["example:cat", "example:coffee"], top=2)
    assert [one[0].label for one in found] == ["tabby", "espresso"] and found[0][1].label == "Egyptian cat"
    assert found.names == ("example:cat", "example:coffee")


def test_another_name_is_an_error_that_lists_them() -> None:
    with pytest.raises(VitrailError, match=r"no such example\. Did you mean cat\? Included are example:cat, example:coffee"):
        open_source("example:cats")
    with pytest.raises(VitrailError, match="It has no options"):
        open_source("example:cat?val=0.1")
