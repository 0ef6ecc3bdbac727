"""Images that keep their aspect ratio: which size they get, and that nothing of them is lost."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.image_files import encoded, picture
from tests.data.memory_splits import MemorySplit
from vitrail.data import Preprocess, preset
from vitrail.data.loader import EvalLoader
from vitrail.errors import VitrailError

sides = st.integers(1, 4000)


@settings(deadline=None, max_examples=300)
@given(sides, sides, st.integers(16, 600), st.integers(1, 1200), st.sampled_from([(1, 1), (14, 14), (16, 16), (32, 16)]))
def test_the_nearest_whole_patches_within_the_limit(
    height: int, width: int, side: int, extra: int, multiple: tuple[int, int]
) -> None:
    limit = max(extra, *multiple)
    spec = preset("timm", size=side).keep_aspect(multiple, limit)
    found = spec._resized(height, width)
    factor = min(Fraction(side, min(height, width)), Fraction(limit, max(height, width)))
    for new, old, step in zip(found, (height, width), multiple, strict=True):
        assert new % step == 0 and step <= new <= limit
        at_limit = new + step > limit or new == step
        assert abs(new - old * factor) <= Fraction(step, 2) or at_limit
    assert spec._resized(width, height) == found[::-1] or multiple[0] != multiple[1]


def test_sizes_of_usual_photos() -> None:
    spec = preset("google-vit", size=224).keep_aspect((16, 16))
    sizes = {
        (480, 640): (224, 304),
        (640, 480): (304, 224),
        (1080, 1920): (224, 400),
        (500, 500): (224, 224),
        (100, 5000): (16, 448),
    }
    assert {size: spec._resized(*size) for size in sizes} == sizes
    assert preset("google-vit", size=224).keep_aspect((16, 16), 224)._resized(480, 640) == (176, 224)  # by the longest side
    assert preset("google-vit", size=(224, 320)).keep_aspect((32, 32))._resized(480, 640) == (224, 288)


@pytest.mark.parametrize("name", ["google-vit", "big-vision", "timm", "cifar"])
def test_pixels_are_those_of_a_plain_resize_to_that_size(name: str) -> None:
    image, spec = picture(1, 90, 131), preset(name, size=32).keep_aspect((8, 8))
    assert spec.pixels(image).shape == (32, 48, 3)
    plain = dataclasses.replace(preset(name, size=32), size=(32, 48), resize="square", resize_to=None)
    assert np.array_equal(spec.pixels(image), plain.pixels(image))
    assert torch.equal(spec(encoded(image)), plain(encoded(image)))


def test_it_is_recorded_and_older_records_stay_as_they_were() -> None:
    plain = preset("timm", size=32)
    spec = plain.keep_aspect((8, 8), 48)
    assert Preprocess.from_dict(spec.to_dict()) == spec and spec.fingerprint() != plain.fingerprint()
    assert "max_size" not in plain.to_dict() and plain.fingerprint() == "a7a281dc1646a367"
    assert spec.with_size(64).max_size == 96 and spec.with_size(64).resize_to == 64
    assert "aspect ratio kept, short side 32, long side up to 48" in spec.describe()


def test_mistakes_are_sentences() -> None:
    with pytest.raises(VitrailError, match=r"limited to 8 pixels, but the model's patches have 16: allow 16 or more"):
        preset("timm", size=32).keep_aspect((16, 16), 8)
    with pytest.raises(VitrailError, match=r"max_size and multiple go with resize='keep-aspect'"):
        Preprocess(size=(32, 32), max_size=64)
    with pytest.raises(VitrailError, match="pad has no effect"):
        dataclasses.replace(preset("timm", size=32).keep_aspect((8, 8)), pad=True)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_groups_by_size_and_keeps_every_image(workers: int) -> None:
    sizes = [(40, 40), (40, 60), (60, 40), (40, 40), (30, 60), (60, 40), (41, 39)] * 3
    split = MemorySplit([picture(k, *size) for k, size in enumerate(sizes)])
    spec = preset("timm", size=32).keep_aspect((8, 8))
    loader = EvalLoader(split, preprocess=spec, batch=9, workers=workers)
    seen: list[int] = []
    for batch in loader:
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            assert torch.equal(image, spec(picture(index, *sizes[index])))
            assert int(batch.targets[batch.indices.tolist().index(index)]) == int(split.targets[index])
            seen.append(index)
    assert sorted(seen) == list(range(len(sizes)))
    first = next(iter(EvalLoader(split, preprocess=spec, batch=21, workers=0)))
    assert len(first) == 9 and first.images.shape == (9, 3, 32, 32)  # 40×40 and 41×39
