"""Large images are decoded and resized in bands: the same result, and no second copy of the whole."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.image_files import encoded, picture
from vitrail.data import decode as decoding
from vitrail.data import resize as resizing
from vitrail.data.decode import decode
from vitrail.data.preprocess import PRESETS, Preprocess, preset
from vitrail.data.resize import resize
from vitrail.data.types import BadImage

SIZES = [
    ((61, 47), (20, 30)),
    ((40, 90), (64, 7)),
    ((33, 64), (33, 20)),
    ((90, 30), (31, 30)),
    ((1, 300), (5, 40)),
    ((200, 3), (9, 9)),
]


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for module in (decoding, resizing):
        monkeypatch.setattr(module, "_BAND", 500)
    monkeypatch.setattr(resizing, "_LINES", 50)
    return monkeypatch


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "area", "lanczos"])
def test_bands_give_the_same_pixels(interpolation: Any, antialias: bool, small_bands: pytest.MonkeyPatch) -> None:
    for old, new in SIZES:
        for dtype, channels in ((np.uint8, 3), (np.uint8, 5), (np.uint16, 1)):
            image = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (*old, channels), dtype)
            for rounding in ("none", "nearest"):
                options: Any = {"interpolation": interpolation, "antialias": antialias, "rounding": rounding}
                in_bands = resize(image, new, **options)
                with small_bands.context() as whole:
                    whole.setattr(resizing, "_BAND", 1 << 24)
                    whole.setattr(resizing, "_LINES", 1 << 24)
                    expected = resize(image, new, **options)
                if antialias or interpolation not in ("bicubic", "lanczos"):
                    assert np.array_equal(in_bands, expected)
                else:  # a product of matrices, which are smaller without the rows of no weight
                    np.testing.assert_allclose(in_bands, expected, rtol=1e-5, atol=1 if rounding == "nearest" else 1e-2)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I"])
def test_bands_are_decoded_to_the_same_pixels(mode: str, small_bands: pytest.MonkeyPatch) -> None:
    colour = Image.fromarray(picture(0, 60, 40))
    image = (
        Image.fromarray(picture(0, 60, 40)[:, :, 0].astype(np.int32) * 200).convert(mode)
        if mode[0] == "I"
        else colour.convert(mode)
    )
    file = io.BytesIO()
    image.save(file, "TIFF")
    for channels in (1, 3, 4):
        for bits in (8, 16):
            in_bands = decode(file.getvalue(), channels=channels, bits=bits)
            with small_bands.context() as whole:
                whole.setattr(decoding, "_BAND", 1 << 24)
                assert np.array_equal(in_bands, decode(file.getvalue(), channels=channels, bits=bits))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_copy_no_large_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decoding, resizing):
        monkeypatch.setattr(module, "_BAND", 1 << 15)
    monkeypatch.setattr(resizing, "_BLOCK", 16)
    file = encoded(np.zeros((2000, 2000, 3), np.uint8), "PNG")
    preset(name)(file)
    tracemalloc.start()
    try:
        preset(name)(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # google-vit reserves float32 for all rows (48 MB), of which it writes those that are read.
    assert peak < (62e6 if name == "google-vit" else 26e6), f"{peak:,} bytes for 12,000,000 of pixels"


def test_cropping_makes_no_float_copy_of_the_whole() -> None:
    spec = Preprocess(size=(8, 8), resize="none", rounding="none")
    image = np.arange(1000 * 1000 * 3, dtype=np.uint8).reshape(1000, 1000, 3)
    tracemalloc.start()
    try:
        pixels = spec.pixels(image)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(pixels, image[496:504, 496:504])
    assert peak < 1e6


def test_a_strip_that_would_become_huge_is_refused() -> None:
    with pytest.raises(BadImage, match="1×2000000 pixels: resizing to 256×512000000 would exceed the limit"):
        preset("imagenet")(np.zeros((1, 2_000_000, 3), np.uint8))
